"""What a drafter's training forward sees of one pack, and which drafts of which rounds count."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from data_pipelines.features import Features, FeatureSpec
from data_pipelines.packing import Pack, position_ids

PADDING = -1  # the document of rows that only fill a pack up


def _as_they_are(*rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return rows


@dataclass(frozen=True)
class Part:
    """Which rows of a pack a rank has: slice `index` of `count` slices of one length. All of them, by default.

    gather: tensors [..., R, d] of this rank's rows → the same of all ranks' rows, in order, [..., count · R, d];
    differentiable, and every rank has to call it equally often.
    """

    index: int = 0
    count: int = 1
    gather: Callable[..., tuple[torch.Tensor, ...]] = _as_they_are

    def rows(self, tokens: int) -> slice:
        """Of a pack of so many tokens; the last slice may reach past its end."""
        size = -(-tokens // self.count)
        return slice(self.index * size, (self.index + 1) * size)


@dataclass(frozen=True, eq=False)
class Batch:
    """One pack on the device. T tokens, A taps, width H; R of the rows are this rank's own.

    input_ids, document_ids, positions: int64 [T]. supervised: bool [T]. taps [R, A, H]: compute dtype. final: the same,
    [≥ R, H]; behind the own rows come those that the teacher of their drafts is made of.
    Where ranks share a pack, T is a multiple of their number: what is missing are documents of one row that nothing sees.
    address: (seed, index in the plan), what this pack's random draws are seeded with. quarantined: there are no features,
    and nothing of it counts.
    """

    input_ids: torch.Tensor
    document_ids: torch.Tensor
    positions: torch.Tensor
    supervised: torch.Tensor
    taps: torch.Tensor
    final: torch.Tensor
    address: tuple[int, ...] = ()
    quarantined: bool = False
    part: Part = Part()

    @property
    def own(self) -> slice:
        return self.part.rows(len(self.input_ids))

    @property
    def own_rows(self) -> torch.Tensor:
        """int64 [R]"""
        return torch.arange(self.own.start, self.own.stop, device=self.input_ids.device)

    @property
    def tokens(self) -> int:
        """How many of the own rows are a document's."""
        return int((self.document_ids[self.own] != PADDING).sum())

    def generator(self) -> torch.Generator:
        """Randomness by address, not by consumption: a resumed or re-sharded run draws the same."""
        seed = int.from_bytes(hashlib.sha256(repr(self.address).encode()).digest()[:7], "little")
        return torch.Generator().manual_seed(seed)

    @classmethod
    def of(
        cls,
        pack: Pack,
        features: Features,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        address: tuple[int, ...],
        part: Part = Part(),
    ) -> Batch:
        """features: of the part's rows."""
        missing = -len(pack) % part.count

        def padded(array, fill: int = 0) -> torch.Tensor:
            return F.pad(torch.from_numpy(array), (0, missing), value=fill).to(device)

        return cls(
            input_ids=padded(pack.input_ids).long(),
            document_ids=padded(pack.document_ids, PADDING).long(),
            positions=padded(position_ids(pack.lengths)).long(),
            supervised=padded(pack.loss_mask),
            taps=features.taps.to(device, dtype),
            final=features.final.to(device, dtype),
            address=address,
            part=part,
        )

    @classmethod
    def weightless(cls, pack: Pack, spec: FeatureSpec, part: Part = Part(), **options) -> Batch:
        """In the place of a pack without features: the same shapes, nothing supervised, hence no draft that counts."""
        own = part.rows(len(pack))
        taps = torch.zeros(own.stop - own.start, len(spec.taps), spec.hidden_size)
        made = cls.of(pack, Features(taps, torch.zeros(len(taps), spec.hidden_size)), part=part, **options)
        return replace(made, supervised=torch.zeros_like(made.supervised), quarantined=True)


def supervised_run(batch: Batch) -> torch.Tensor:
    """int64 [T]: how many tokens in a row, ending here and of this document, are supervised."""
    index = torch.arange(len(batch.input_ids), device=batch.input_ids.device)
    # The last place at or before each position where a run cannot continue: an unsupervised token, or the one before a
    # document's start.
    broken = torch.where(batch.supervised, index - batch.positions - 1, index)
    return torch.where(batch.supervised, index - torch.cummax(broken, 0).values, 0)


def round_counts(batch: Batch, first: int, depth: int) -> torch.Tensor:
    """Which drafts count (rule 1 of the drafters' common rules: the mask is on the round). bool [depth, T].

    Row t's round starts at the bonus token b = t + first and its draft of step k predicts x_{b+1+k}. It counts iff
    x_b … x_{b+1+k} are all supervised and of one document, which is row t's own.
    """
    run = supervised_run(batch)
    size = len(run)
    rows = torch.arange(size, device=run.device)
    counts = torch.zeros(depth, size, dtype=torch.bool, device=run.device)
    for k in range(depth):
        label = rows + first + 1 + k
        inside = label < size
        clipped = label.clamp(max=size - 1)
        same_document = batch.document_ids[clipped] == batch.document_ids
        counts[k] = inside & same_document & (run[clipped] >= k + 2)
    return counts
