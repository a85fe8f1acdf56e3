"""What every drafter is: a config, a contract with the target, a training forward, a draft step, an export map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from data_pipelines.errors import UserError

from ..batch import Batch
from ..losses import Teacher
from ..target import FrozenTarget


@dataclass
class DrafterConfig:
    name: str = ""


@dataclass(frozen=True)
class Contract:
    """What a drafter needs from the target: taps, the k of the H^k that feed it, ascending. The final pre-norm state always
    comes too."""

    taps: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Committed:
    """Rows that decoding has newly committed, with the target's real features: what a drafter's state grows by.

    Row t: taps [B, T, A, H] and final [B, T, H] of position t, next_tokens [B, T] (x_{t+1}), positions [B, T] (t), valid
    bool [B, T]. The last valid row of a sequence carries the bonus token as its next token. At prefill: all rows of the
    prompt.
    """

    taps: torch.Tensor
    final: torch.Tensor
    next_tokens: torch.Tensor
    positions: torch.Tensor
    valid: torch.Tensor


@dataclass(frozen=True, eq=False)
class Targets:
    """The part of a pack's loss that does not depend on the drafter's weights: made first, so that the denominators of a
    whole optimizer step are known before any backward.

    counts: bool [K, T], the drafts that count (metrics). trained: bool [K, T], those that the loss takes.
    """

    teacher: Teacher
    counts: torch.Tensor
    trained: torch.Tensor

    @property
    def denominators(self) -> torch.Tensor:
        """[K]: how many drafts of each step are trained."""
        return self.trained.sum(1).double()


class Drafter(nn.Module):
    """Subclasses implement `contract`, `targets`, `forward`, `new_state`, `propose` and the export pair."""

    Config: ClassVar[type[DrafterConfig]]
    metrics: ClassVar[tuple[str, ...]]  # rows of the tensor that forward returns beside the loss

    config: Any
    depth: int  # K, the number of draft steps that are trained
    step_weights: list[float]  # [K], what each step's mean weighs in the loss

    @classmethod
    def contract(cls, config: Any, num_layers: int) -> Contract:
        raise NotImplementedError

    def targets(self, batch: Batch, frozen: FrozenTarget) -> Targets:
        raise NotImplementedError

    def forward(
        self, batch: Batch, targets: Targets, frozen: FrozenTarget, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """weights [K]: what one trained draft of each step weighs in the loss. Returns the weighted sum of the losses and
        sums [len(metrics), K] for the log, without gradient."""
        raise NotImplementedError

    def shard_units(self) -> list[nn.Module]:
        """Submodules that run once in a training forward and are worth gathering by themselves."""
        return []

    def start_head(self, frozen: FrozenTarget) -> None:
        """A trained head, if there is one, begins as the target's rows."""

    def new_state(self, batch_size: int) -> Any:
        raise NotImplementedError

    def propose(self, state: Any, rows: Committed, frozen: FrozenTarget, k: int) -> torch.Tensor:
        """Draft k tokens greedily for each sequence: int64 [B, k], ids of the target's vocabulary."""
        raise NotImplementedError

    def export_config(self, frozen: FrozenTarget) -> dict[str, Any]:
        """The drafter's own keys of the export's config.json: `speculators_model_type`, `architectures`,
        `transformer_layer_config` and those of its kind."""
        raise NotImplementedError

    @classmethod
    def config_from_export(cls, exported: dict[str, Any]) -> DrafterConfig:
        """What `export_config` wrote (a whole config.json) → a config that builds the same modules, head included."""
        raise NotImplementedError

    def export_tensors(self, frozen: FrozenTarget) -> dict[str, torch.Tensor]:
        raise NotImplementedError


def check_taps(taps: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > num_layers:
        raise UserError(
            f"drafter.taps={list(taps)}", fix=f"name distinct layers of the target in ascending order, 0…{num_layers}"
        )
    return taps
