"""What every drafter is: a config, a contract with the target, a training forward, a draft step, an export map."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from data_pipelines.engines import Target
from data_pipelines.errors import UserError

from ..batch import Batch, round_counts
from ..losses import Judged, Mixture, Teacher, streamed_loss, summarise_teacher
from ..target import FrozenTarget
from .cost import Cost
from .layers import scale_norm


@dataclass
class DrafterConfig:
    """loss: any mixture of the named losses, such as `0.1*ce + 0.9*l1`. draft_vocab_size: D, the most frequent labels;
    0: all of V. keep_unmapped: also train drafts whose teacher argmax lies outside the draft vocabulary.

    init: an export, a run's folder or a hub id of a drafter to begin from: its weights, its draft vocabulary and all keys
    that say what it is, unless they are given and contradict it. layer: keys of the layers' transformers config that do not
    follow the target (`shape.LAYER_KEYS`); `init` fills it in.

    training: the keys that say how a drafter is trained; all others say what it is.
    """

    training: ClassVar[frozenset[str]] = frozenset({"loss", "keep_unmapped"})

    name: str = ""
    loss: str = "soft_ce"
    draft_vocab_size: int = 0
    keep_unmapped: bool = False
    init: str = ""
    layer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Mixture.parse(self.loss)

    @property
    def max_drafts(self) -> int | None:
        """The most tokens that can be drafted a round; None: any number."""
        return None

    def completed(self, tokenizer, vocab_size: int) -> DrafterConfig:
        """With what only the target's tokenizer can tell filled in."""
        return self


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

    counts: bool [K, T], the drafts that count (metrics): of this rank's rows. trained: bool [K, T], those that the loss
    takes. offset: row t's draft of step k is to match row t + k + offset of `teacher`.
    """

    teacher: Teacher
    counts: torch.Tensor
    trained: torch.Tensor
    offset: int

    @property
    def denominators(self) -> torch.Tensor:
        """[K]: how many drafts of each step are trained."""
        return self.trained.sum(1).double()

    @property
    def entries(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Step and row of every draft that counts, int64 [N] each, in the order of steps, then of rows."""
        return self.counts.nonzero().unbind(1)

    @property
    def teacher_rows(self) -> torch.Tensor:
        """Of the entries, int64 [N]."""
        step, row = self.entries
        return row + step + self.offset


class Drafter(Cost, nn.Module):
    """Subclasses implement `contract`, `forward`, `new_state`, `propose` and the export pair.

    Row t's round starts at the bonus token x_{t+first}; its draft of step k predicts x_{t+first+1+k}, and the teacher
    row of that is t+first+k.
    """

    Config: ClassVar[type[DrafterConfig]]
    metrics: ClassVar[tuple[str, ...]] = ("loss", "counted", "trained", "reached", "conditional", "prefix", "expected")
    first: ClassVar[int]

    config: Any
    depth: int  # K, the number of draft steps that are trained
    step_weights: list[float]  # [K], what a draft of each step weighs in the loss
    vocab_size: int  # V
    kept: torch.Tensor | None  # int64 [D], the target ids of the draft vocabulary, ascending; None: all of V
    recompute: bool = False  # what a step (block drafters: a layer) keeps for the backward is made again there instead

    @classmethod
    def contract(cls, config: Any, num_layers: int) -> Contract:
        raise NotImplementedError

    # ---- vocabulary

    def set_vocabulary(self, kept: torch.Tensor | None, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.register_buffer("kept", kept, persistent=False)
        if kept is not None:  # as exports have them: offsets, and membership
            membership = torch.zeros(vocab_size, dtype=torch.bool)
            membership[kept] = True
            self.register_buffer("d2t", kept - torch.arange(len(kept)))
            self.register_buffer("t2d", membership)

    @property
    def draft_vocab_size(self) -> int:
        return self.vocab_size if self.kept is None else len(self.kept)

    def to_draft(self, tokens: torch.Tensor) -> torch.Tensor:
        """Ids of the target's vocabulary → ids of the draft vocabulary, -1 for those outside."""
        if self.kept is None:
            return tokens
        return torch.where(self.t2d[tokens], (self.t2d.cumsum(0) - 1)[tokens], -1)

    def to_target(self, drafts: torch.Tensor) -> torch.Tensor:
        """Ids of the draft vocabulary → ids of the target's."""
        return drafts if self.kept is None else self.kept[drafts]

    # ---- training

    @property
    def lookahead_rows(self) -> int:
        """How many rows behind its own a row's drafts have their teachers in."""
        return self.first + self.depth - 1

    def rounds(self, batch: Batch) -> torch.Tensor:
        """The drafts of a whole pack that count: bool [K, T]."""
        return round_counts(batch, self.first, self.depth)

    def targets(self, batch: Batch, frozen: FrozenTarget) -> Targets:
        rounds = self.rounds(batch)
        counts = torch.zeros_like(rounds)
        counts[:, batch.own] = rounds[:, batch.own]
        step, row = counts.nonzero().unbind(1)
        offset = self.first - batch.own.start
        teacher_rows = row + step + offset
        needed = torch.zeros(len(batch.final), dtype=torch.bool, device=row.device)
        needed[teacher_rows] = True
        teacher = summarise_teacher(frozen, batch.final, needed)
        trained = counts
        if self.kept is not None and not self.config.keep_unmapped:
            trained = counts.clone()
            trained[step, row] = self.t2d[teacher.argmax[teacher_rows]]
        return Targets(teacher, counts, trained, offset)

    def divisors(self, denominators: torch.Tensor) -> torch.Tensor:
        """What each step's summed loss is divided by, [K]: here its own number of trained drafts, so that each step is
        a mean of its own. denominators [K]: of one optimizer step, summed over micro-batches and ranks."""
        return denominators

    def forward(
        self, batch: Batch, targets: Targets, frozen: FrozenTarget, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """weights [K]: what one trained draft of each step weighs in the loss. Returns the weighted sum of the losses and
        sums [len(metrics), K] for the log, without gradient."""
        raise NotImplementedError

    def recomputed(self, function: Callable, *args: Any) -> Any:
        """`function(*args)`; with `recompute`, what it would keep for the backward is computed again there.

        The function has to be one of its arguments alone.
        """
        if not (self.recompute and torch.is_grad_enabled()):
            return function(*args)
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)

    def draft_loss(
        self,
        batch: Batch,
        targets: Targets,
        frozen: FrozenTarget,
        hidden: torch.Tensor,
        head: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[torch.Tensor, Judged]:
        """hidden [N, H']: normed states of `targets.entries`. head [D, H']. weights [N]. Differentiable in both."""
        step, row = targets.entries
        return streamed_loss(
            Mixture.parse(self.config.loss),
            hidden,
            head,
            teacher=targets.teacher,
            teacher_readout=frozen.draft_readout(self.kept),
            teacher_rows=targets.teacher_rows,
            labels=self.to_draft(batch.input_ids[row + self.first + step + 1]),
            weights=weights,
        )

    @torch.no_grad()
    def sums(self, targets: Targets, judged: Judged, losses: torch.Tensor) -> torch.Tensor:
        """[len(metrics), K]. losses [N]: of each draft, zero for one that is not trained."""
        step, row = targets.entries
        right = torch.zeros_like(targets.counts)
        right[step, row] = self.to_target(judged.argmax) == targets.teacher.argmax[targets.teacher_rows]
        prefix = right.cumprod(0).bool()  # all of steps 0..k right
        reached = torch.cat([targets.counts[:1], targets.counts[1:] & prefix[:-1]])

        def per_step(values: torch.Tensor) -> torch.Tensor:
            return torch.zeros(self.depth, dtype=torch.double, device=row.device).index_add_(0, step, values.double())

        sums = {
            "loss": per_step(losses),
            "counted": targets.counts.sum(1).double(),
            "trained": targets.trained.sum(1).double(),
            "reached": reached.sum(1).double(),
            "conditional": (reached & right).sum(1).double(),
            "prefix": (targets.counts & prefix).sum(1).double(),
            "expected": per_step(judged.expected_acceptance),
        }
        return torch.stack([sums[name] for name in self.metrics])

    def shard_units(self) -> list[nn.Module]:
        """Submodules that run once in a training forward and are worth gathering by themselves."""
        return []

    def start_head(self, frozen: FrozenTarget) -> None:
        """Fresh logits begin on the target's scale, and a trained head, if there is one, as the target's rows.

        A drafter's logits are the plain product of head and normed state: what a family multiplies its logits with
        (Granite by 1/8, Cohere by 1/16) has to be in the final norm's gain. AdamW moves a gain by about the learning
        rate a step, so it must not begin at 1.
        """
        for norm in self.final_norms():
            scale_norm(norm, frozen.readout.scale)

    def final_norms(self) -> list[nn.Module]:
        """Those that the head reads."""
        raise NotImplementedError

    def warm_start(self, target: Target) -> None:
        """Weights that the target's checkpoint brings along, if this drafter can begin from them."""

    def new_state(self, batch_size: int) -> Any:
        """What `propose` keeps from round to round. Its `select(sequences)` leaves only these of the batch, int64 [B']."""
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


def default_taps(num_layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer: [2, L//2, L-3]."""
    return tuple(sorted({min(2, num_layers), num_layers // 2, max(0, num_layers - 3)}))


def check_taps(taps: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > num_layers:
        raise UserError(
            f"drafter.taps={list(taps)}", fix=f"name distinct layers of the target in ascending order, 0…{num_layers}"
        )
    return taps
