"""What a drafter's training forward sees of one pack, and which drafts of which rounds count."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch

from data_pipelines.features import Features, FeatureSpec
from data_pipelines.packing import Pack, position_ids


@dataclass(frozen=True, eq=False)
class Batch:
    """One pack on the device. T tokens, A taps, width H.

    input_ids, document_ids, positions: int64 [T]. supervised: bool [T]. taps [T, A, H] and final [T, H]: compute dtype.
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

    def generator(self) -> torch.Generator:
        """Randomness by address, not by consumption: a resumed or re-sharded run draws the same."""
        seed = int.from_bytes(hashlib.sha256(repr(self.address).encode()).digest()[:7], "little")
        return torch.Generator().manual_seed(seed)

    @classmethod
    def of(
        cls, pack: Pack, features: Features, *, dtype: torch.dtype, device: torch.device | str, address: tuple[int, ...]
    ) -> Batch:
        def ids(array) -> torch.Tensor:
            return torch.from_numpy(array).long().to(device)

        return cls(
            input_ids=ids(pack.input_ids),
            document_ids=ids(pack.document_ids),
            positions=ids(position_ids(pack.lengths)),
            supervised=torch.from_numpy(pack.loss_mask).to(device),
            taps=features.taps.to(device, dtype),
            final=features.final.to(device, dtype),
            address=address,
        )

    @classmethod
    def weightless(cls, pack: Pack, spec: FeatureSpec, **options) -> Batch:
        """In the place of a pack without features: the same shapes, nothing supervised, hence no draft that counts."""
        taps = torch.zeros(len(pack), len(spec.taps), spec.hidden_size)
        made = cls.of(pack, Features(taps, torch.zeros(len(pack), spec.hidden_size)), **options)
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
