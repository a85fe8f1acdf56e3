"""Documents → packs → the plan of a run.

A *document* is one tokenised conversation with its loss mask. A *pack* is documents laid end to end, at most
`pack_tokens` tokens: the unit that a producer computes, the store holds and a trainer rank consumes in one micro-batch.
The *plan* is the sequence of packs of a whole run, a pure function of (documents, pack_tokens, seed).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .errors import UserError


@dataclass(frozen=True, eq=False)
class Document:
    """One tokenised conversation.

    input_ids: int32 [n]. loss_mask: bool [n], True where the token was written by the assistant (end of turn included).
    origin: where the row came from, for people ("file.jsonl:12").
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    origin: str = ""

    def __len__(self) -> int:
        return len(self.input_ids)


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


class Plan(Sequence[Pack]):
    """The packs of a run, in the order in which they are trained: `plan[i]` for i in [0, epochs · packs_per_epoch).

    The composition of the packs depends on the seed only, the order in an epoch on (seed, epoch): a later epoch has the
    same packs in another order, so that a cache of features serves it. Optimizer step s consumes packs [s·G, (s+1)·G);
    rank r of W those with index ≡ r (mod W).
    """

    def __init__(self, documents: Sequence[Document], *, pack_tokens: int, seed: int, epochs: int = 1):
        longest = max((len(d) for d in documents), default=0)
        if not documents:
            raise UserError("there is no document to train on", fix="look at quarantine.jsonl for the reasons")
        if longest > pack_tokens:
            raise UserError(
                f"a document of {longest} tokens does not fit into a pack of {pack_tokens}",
                fix=f"raise data.pack_tokens to {longest}, or lower data.max_document_tokens",
            )
        self.seed, self.epochs, self.pack_tokens = seed, epochs, pack_tokens
        order = np.random.default_rng([seed, 0]).permutation(len(documents))
        self.packs = [Pack(tuple(group)) for group in _best_fit([documents[i] for i in order], pack_tokens)]
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.epochs * len(self.packs)

    def __getitem__(self, index: int) -> Pack:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        epoch, position = divmod(index, len(self.packs))
        if epoch not in self._orders:
            self._orders[epoch] = np.random.default_rng([self.seed, 1, epoch]).permutation(len(self.packs))
        return self.packs[self._orders[epoch][position]]

    def share(self, rank: int, world_size: int, start: int, stop: int) -> Iterator[int]:
        """Indices in [start, stop) that `rank` consumes, in order."""
        first = start + (rank - start) % world_size
        return iter(range(first, stop, world_size))

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.seed} {self.pack_tokens} {self.epochs}".encode())
        for pack in self.packs:
            digest.update(np.asarray(pack.lengths, dtype="<i4").tobytes())
            digest.update(pack.input_ids.astype("<i4").tobytes())
            digest.update(np.packbits(pack.loss_mask).tobytes())
        return digest.hexdigest()[:16]

    @property
    def padding_share(self) -> float:
        """The share of pack room that stays empty, in [0, 1). (Nothing is padded on the wire: packs are just shorter.)"""
        return 1 - sum(len(p) for p in self.packs) / (len(self.packs) * self.pack_tokens)


def _best_fit(documents: Sequence[Document], room: int, open_packs: int = 64) -> list[list[Document]]:
    """Best fit over a bounded number of open packs: each document goes where the least room would be left."""
    packs: list[list[Document]] = []
    left: dict[int, int] = {}  # index of an open pack → room left
    for document in documents:
        fits = [(left[i] - len(document), i) for i in left if left[i] >= len(document)]
        if fits:
            remaining, i = min(fits)
            packs[i].append(document)
            left[i] = remaining
        else:
            left[len(packs)] = room - len(document)
            packs.append([document])
        if len(left) > open_packs:
            del left[min(left, key=left.__getitem__)]
    return packs
