"""Documents → packs → the plan of a run.

A *document* is one tokenised conversation with its loss mask. A *pack* is documents laid end to end, at most
`pack_tokens` tokens: the unit that a producer computes, the store holds and a trainer rank consumes in one micro-batch.
The *plan* is the sequence of packs of a whole run, a pure function of (documents, pack_tokens, seed).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .documents import Document, Documents
from .errors import UserError

_WINDOW = 4096  # documents that are looked at together: best fit works best from the longest to the shortest
_OPEN = 4096  # packs that may still be filled: each long document of a window opens one, for the short ones after it


@dataclass(frozen=True, eq=False)
class Pack:
    """Documents laid end to end. All arrays have length T = Σ len(document)."""

    documents: tuple[Document, ...]

    @cached_property
    def input_ids(self) -> np.ndarray:
        return np.concatenate([d.input_ids for d in self.documents]).astype(np.int32)

    @cached_property
    def loss_mask(self) -> np.ndarray:
        return np.concatenate([d.loss_mask for d in self.documents])

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(d) for d in self.documents)

    @cached_property
    def document_ids(self) -> np.ndarray:
        return document_ids(self.lengths)

    @property
    def origins(self) -> list[str]:
        return [d.origin for d in self.documents]

    def __len__(self) -> int:
        return sum(self.lengths)


def document_ids(lengths: Sequence[int]) -> np.ndarray:
    """int32 [T]: which document of the pack each position belongs to."""
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)


def position_ids(lengths: Sequence[int]) -> np.ndarray:
    """int32 [T]: position inside its own document."""
    return np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])


def pack_id(input_ids: np.ndarray, lengths: Sequence[int], features: str) -> str:
    """A hash of everything that determines a pack's features, so that a cache can be shared and a stale one cannot be hit.

    features: what the features are of and how they are computed (`FeatureSpec.fingerprint`).
    """
    digest = hashlib.sha256(features.encode())
    digest.update(np.asarray(lengths, dtype="<i4").tobytes())
    digest.update(np.asarray(input_ids, dtype="<i4").tobytes())
    return digest.hexdigest()[:32]


class Packs(Sequence[Pack]):
    """All documents, each in one pack: a function of (documents, pack_tokens, seed).

    A pack is made when it is asked for; what is held is 8 bytes a document.
    """

    def __init__(self, documents: Documents, *, pack_tokens: int, seed: int):
        longest = int(documents.lengths.max(initial=0))
        if not len(documents):
            raise UserError("there is no document to train on", fix="look at quarantine.jsonl for the reasons")
        if longest > pack_tokens:
            raise UserError(
                f"a document of {longest} tokens does not fit into a pack of {pack_tokens}",
                fix=f"raise data.pack_tokens to {longest}, or lower data.max_document_tokens",
            )
        self.documents, self.pack_tokens = documents, pack_tokens
        drawn = np.random.default_rng([seed, 0]).permutation(len(documents))
        chosen = best_fit(documents.lengths[drawn].tolist(), pack_tokens)
        self._members = drawn[np.argsort(chosen, kind="stable")]  # the documents of pack 0, of pack 1, …
        self._ends = np.cumsum(np.bincount(chosen))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Pack:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = int(self._ends[index - 1]) if index else 0
        return Pack(tuple(self.documents[int(i)] for i in self._members[start : int(self._ends[index])]))

    @cached_property
    def fingerprint(self) -> str:
        """Of the documents and of how they are laid out."""
        digest = hashlib.sha256(f"{self.documents.fingerprint} {self.pack_tokens}".encode())
        digest.update(self._members.astype("<i8").data)
        digest.update(self._ends.astype("<i8").data)
        return digest.hexdigest()[:16]

    @property
    def padding_share(self) -> float:
        """The share of pack room that stays empty, in [0, 1). (Nothing is padded on the wire: packs are just shorter.)"""
        return 1 - len(self.documents.input_ids) / (len(self) * self.pack_tokens)


class Plan(Sequence[Pack]):
    """The packs of a run, in the order in which they are trained: `plan[i]` for i in [0, epochs · len(plan.packs)).

    The composition of the packs depends on the seed only, the order in an epoch on (seed, epoch): a later epoch has the
    same packs in another order, so that a cache of features serves it. Optimizer step s consumes packs [s·G, (s+1)·G);
    rank r of W those with index ≡ r (mod W).
    """

    def __init__(self, documents: Documents, *, pack_tokens: int, seed: int, epochs: int = 1):
        self.packs = Packs(documents, pack_tokens=pack_tokens, seed=seed)
        self.seed, self.epochs = seed, epochs
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.epochs * len(self.packs)

    def __getitem__(self, index: int) -> Pack:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        epoch, position = divmod(index, len(self.packs))
        if epoch not in self._orders:
            self._orders[epoch] = np.random.default_rng([self.seed, 1, epoch]).permutation(len(self.packs))
        return self.packs[int(self._orders[epoch][position])]

    def share(self, rank: int, world_size: int, start: int, stop: int) -> Iterator[int]:
        """Indices in [start, stop) that `rank` consumes, in order."""
        first = start + (rank - start) % world_size
        return iter(range(first, stop, world_size))

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same (documents, pack_tokens, seed, epochs), and for nothing else."""
        return hashlib.sha256(f"{self.packs.fingerprint} {self.seed} {self.epochs}".encode()).hexdigest()[:16]


def best_fit(lengths: Sequence[int], room: int) -> np.ndarray:
    """int64 [len(lengths)]: the pack, counted from 0, that each document goes into: where the least room would be left.

    Documents are placed window by window, the longest of a window first, and of the packs that still have room only a
    bounded number stays open: time is linear in the documents and nothing is held but the open packs.
    """
    chosen = np.empty(len(lengths), np.int64)
    left: list[tuple[int, int]] = []  # (room left, pack) of the open packs, ascending
    packs = 0
    for start in range(0, len(lengths), _WINDOW):
        window = range(start, min(start + _WINDOW, len(lengths)))
        for document in sorted(window, key=lambda i: -lengths[i]):
            length = lengths[document]
            place = bisect_left(left, (length, -1))
            if place < len(left):
                space, pack = left.pop(place)
            else:
                space, pack, packs = room, packs, packs + 1
            chosen[document] = pack
            insort(left, (space - length, pack))
            if left[0][0] == 0 or len(left) > _OPEN:
                del left[0]
    return chosen
