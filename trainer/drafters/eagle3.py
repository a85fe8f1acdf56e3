"""EAGLE-3 with training-time test (Li et al. 2025, arXiv 2503.01840), and its 3.1 options.

Letters: T rows of a pack, B sequences, A taps, H width, D draft vocabulary, V vocabulary, K draft steps.

Row t reads the target's taps at position t and the *next* token x_{t+1}, and predicts x_{t+2}. At step k it reads
x_{t+1+k} and its own output of step k-1, and predicts x_{t+2+k}; the teacher is the target's distribution p_{t+1+k}.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig

from data_pipelines.errors import UserError

from ..batch import Batch, round_counts
from ..losses import Mixture, streamed_loss, summarise_teacher
from ..target import FrozenTarget
from .attention import CachedAttention, RolloutAttention
from .base import Committed, Contract, Drafter, DrafterConfig, Targets, check_taps
from .layers import DraftLayer, FusionLayer, Rotary


@dataclass
class Eagle3Config(DrafterConfig):
    """taps: the target layers that feed the drafter; empty: [2, L//2, L-3]. steps: K of the training-time test.
    step_weight: a draft of step k weighs step_weight**k. loss: any mixture of the named losses,
    such as `0.1*ce + 0.9*l1`. draft_vocab_size: D, the most frequent labels; 0: all of V.

    norm_before_fc (one norm over the concatenated taps) and fc_norm (one per tap) exclude each other. norm_output feeds
    the normed output back; with fc_norm that is EAGLE-3.1. train_head: else the head stays the target's rows.
    keep_unmapped: also train drafts whose teacher argmax lies outside the draft vocabulary.
    """

    name: str = "eagle3"
    taps: list[int] = field(default_factory=list)
    num_layers: int = 1
    steps: int = 7
    step_weight: float = 0.8
    loss: str = "soft_ce"
    draft_vocab_size: int = 0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    train_head: bool = False
    keep_unmapped: bool = False

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise UserError("drafter.norm_before_fc and drafter.fc_norm exclude each other", fix="choose one")
        Mixture.parse(self.loss)
        for key in ("steps", "num_layers"):
            if getattr(self, key) < 1:
                raise UserError(f"drafter.{key}={getattr(self, key)}; it must be at least 1")


@dataclass
class State:
    """One cache per layer."""

    caches: list[CachedAttention]


class Eagle3(Drafter):
    Config = Eagle3Config
    metrics = ("loss", "counted", "trained", "reached", "conditional", "prefix", "expected")

    def __init__(self, config: Eagle3Config, target_config, kept: torch.Tensor | None):
        super().__init__()
        self.config, self.depth = config, config.steps
        self.step_weights = [config.step_weight**k for k in range(config.steps)]
        self.taps = self.contract(config, target_config.num_hidden_layers).taps
        self.vocab_size = target_config.vocab_size
        self.layer_config = shape = draft_layer_config(target_config, config.num_layers)
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc = nn.Linear(len(self.taps) * size, size, bias=False)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(len(self.taps) * size, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(size, eps) for _ in self.taps)
        self.rotary = Rotary(shape)
        first = FusionLayer(shape, config.norm_before_residual)
        self.layers = nn.ModuleList([first, *(DraftLayer(shape) for _ in range(config.num_layers - 1))])
        self.norm = nn.RMSNorm(size, eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        self.lm_head: nn.Linear | None = None
        if config.train_head:
            self.lm_head = nn.Linear(size, self.vocab_size if kept is None else len(kept), bias=False)
        self.register_buffer("kept", kept, persistent=False)
        if kept is not None:  # as the export has them: offsets, and membership
            membership = torch.zeros(self.vocab_size, dtype=torch.bool)
            membership[kept] = True
            self.register_buffer("d2t", kept - torch.arange(len(kept)))
            self.register_buffer("t2d", membership)

    @classmethod
    def contract(cls, config: Eagle3Config, num_layers: int) -> Contract:
        default = tuple(sorted({min(2, num_layers), num_layers // 2, max(0, num_layers - 3)}))
        return Contract(check_taps(tuple(config.taps) or default, num_layers))

    def start_head(self, frozen: FrozenTarget) -> None:
        if self.lm_head is not None:
            with torch.no_grad():
                self.lm_head.weight.copy_(frozen.draft_head(self.kept))

    def head(self, frozen: FrozenTarget) -> torch.Tensor:
        """[D, H]"""
        return frozen.draft_head(self.kept) if self.lm_head is None else self.lm_head.weight

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """[..., A, H] → [..., H]"""
        if self.config.fc_norm:
            taps = torch.stack([norm(tap) for norm, tap in zip(self.fc_norm, taps.unbind(-2))], -2)
        flat = taps.flatten(-2)
        return self.fc(self.input_norm(flat) if self.config.norm_before_fc else flat)

    def run_layers(self, embeds, hidden, positions, attentions, rows=None) -> torch.Tensor:
        """One step of all layers. `rows`: the rows to give; keys are made of every row handed in."""
        rope = self.rotary(positions)
        last = len(self.layers) - 1
        hidden = self.layers[0](embeds, hidden, rope, attentions[0], rows if last == 0 else None)
        for i in range(1, last + 1):
            hidden = self.layers[i](hidden, rope, attentions[i], rows if i == last else None)
        return hidden

    # ---- training

    def targets(self, batch: Batch, frozen: FrozenTarget) -> Targets:
        counts = round_counts(batch, first=1, depth=self.depth)
        needed = torch.zeros_like(batch.supervised)
        for k in range(self.depth):
            needed[counts[k].nonzero().squeeze(1) + 1 + k] = True
        teacher = summarise_teacher(frozen, batch.final, needed)
        trained = counts.clone()
        if self.kept is not None and not self.config.keep_unmapped:
            for k in range(self.depth):
                rows = counts[k].nonzero().squeeze(1)
                trained[k, rows] = self.t2d[teacher.argmax[rows + 1 + k]]
        return Targets(teacher, counts, trained)

    def roll_out(self, batch: Batch, frozen: FrozenTarget, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        """Training-time test. rows[k]: int64, ascending, the rows that step k runs (each step's are among the one before's).
        Returns the normed outputs of every step, [len(rows[k]), H]."""
        attentions = [RolloutAttention(batch.document_ids) for _ in self.layers]
        tokens = batch.input_ids.roll(-1)  # row t's next token; the last row of a document is never a row of `rows`
        hidden = self.fuse(batch.taps)
        outputs = []
        current = torch.arange(len(tokens), device=tokens.device)
        for k, wanted in enumerate(rows):
            if k == 0:
                attentions[-1].narrow(wanted)  # the last layer's queries; the others' outputs are its keys
                hidden = self.run_layers(frozen.embed(tokens), hidden, batch.positions, attentions, wanted)
                for attention in attentions[:-1]:
                    attention.narrow(wanted)
            else:
                kept = torch.searchsorted(current, wanted)
                for attention in attentions:
                    attention.narrow(kept)
                hidden = self.run_layers(
                    frozen.embed(tokens[wanted + k]), hidden[kept], batch.positions[wanted] + k, attentions
                )
            current = wanted
            normed = self.norm(hidden)
            outputs.append(normed)
            if self.config.norm_output:
                hidden = normed
        return outputs

    def forward(self, batch, targets, frozen, weights):
        rows = [counts.nonzero().squeeze(1) for counts in targets.counts]
        outputs = self.roll_out(batch, frozen, rows)
        step = torch.cat([torch.full_like(r, k) for k, r in enumerate(rows)])
        row = torch.cat(rows)
        teacher_rows = row + 1 + step
        trained = targets.trained[step, row]
        labels = batch.input_ids[teacher_rows + 1]
        loss, judged = streamed_loss(
            Mixture.parse(self.config.loss),
            torch.cat(outputs),
            self.head(frozen),
            teacher=targets.teacher,
            teacher_head=frozen.draft_head(self.kept),
            teacher_rows=teacher_rows,
            labels=labels if self.kept is None else draft_ids(self.t2d, labels),
            weights=weights[step] * trained,
            cap=frozen.cap,
        )
        return loss, self._sums(judged, targets, step, row, teacher_rows, trained)

    @torch.no_grad()
    def _sums(self, judged, targets, step, row, teacher_rows, trained) -> torch.Tensor:
        """[len(metrics), K], by summing over the rows of each step."""
        drafted = judged.argmax if self.kept is None else self.kept[judged.argmax]
        right = torch.zeros_like(targets.counts)
        right[step, row] = drafted == targets.teacher.argmax[teacher_rows]
        prefix = right.cumprod(0).bool()  # all of steps 0..k right
        reached = torch.cat([targets.counts[:1], targets.counts[1:] & prefix[:-1]])

        def per_step(values: torch.Tensor) -> torch.Tensor:
            return torch.zeros(self.depth, dtype=torch.double, device=row.device).index_add_(0, step, values.double())

        sums = {
            "loss": per_step(judged.loss * trained),
            "counted": targets.counts.sum(1).double(),
            "trained": targets.trained.sum(1).double(),
            "reached": reached.sum(1).double(),
            "conditional": (reached & right).sum(1).double(),
            "prefix": (targets.counts & prefix).sum(1).double(),
            "expected": per_step(judged.expected_acceptance),
        }
        return torch.stack([sums[name] for name in self.metrics])

    # ---- decoding

    def new_state(self, batch_size: int) -> State:
        return State([CachedAttention(batch_size) for _ in self.layers])

    @torch.no_grad()
    def propose(self, state: State, rows: Committed, frozen: FrozenTarget, k: int) -> torch.Tensor:
        for cache in state.caches:
            cache.expect(rows.valid, commit=True)
        embeds, fused = frozen.embed(rows.next_tokens), self.fuse(rows.taps)
        hidden = self.run_layers(embeds, fused, rows.positions, state.caches)
        index = torch.arange(rows.valid.shape[1], device=rows.valid.device)
        last = torch.where(rows.valid, index, 0).amax(1)  # the last valid row of each sequence
        batch = torch.arange(len(last), device=last.device)
        hidden, positions = hidden[batch, last, None], rows.positions[batch, last, None]
        alive = rows.valid.any(1, keepdim=True)
        head, drafts = self.head(frozen), []
        for step in range(k):
            normed = self.norm(hidden)
            token = frozen.cap(normed @ head.T).argmax(-1)  # [B, 1]
            token = token if self.kept is None else self.kept[token]
            drafts.append(token)
            if step == k - 1:
                break
            positions = positions + 1
            for cache in state.caches:
                cache.expect(alive, commit=False)
            feedback = normed if self.config.norm_output else hidden
            hidden = self.run_layers(frozen.embed(token), feedback, positions, state.caches)
        for cache in state.caches:
            cache.drop_drafts()
        return torch.cat(drafts, 1)

    # ---- export (speculators format, eagle3)

    def export_config(self, frozen: FrozenTarget) -> dict[str, Any]:
        config = self.config
        layer = {**self.layer_config.to_diff_dict(), "model_type": "llama", "vocab_size": self.vocab_size}
        if len(self.taps) != 3:  # vLLM's Llama class assumes three otherwise
            layer["num_aux_hidden_states"] = len(self.taps)
        return {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3DraftModel"],
            "draft_vocab_size": self.vocab_size if self.kept is None else len(self.kept),
            "eagle_aux_hidden_state_layer_ids": list(self.taps),
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": config.norm_before_fc,
            "fc_norm": config.fc_norm,
            "norm_output": config.norm_output,
            "embed_requires_grad": False,
            "target_hidden_size": None,
            "transformer_layer_config": layer,
        }

    @classmethod
    def config_from_export(cls, exported: dict[str, Any]) -> Eagle3Config:
        """The head comes with an export, trained or not; how the drafter was trained does not."""
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        return Eagle3Config(
            taps=exported["eagle_aux_hidden_state_layer_ids"],
            num_layers=exported["transformer_layer_config"]["num_hidden_layers"],
            draft_vocab_size=exported["draft_vocab_size"],
            train_head=True,
            **{flag: exported[flag] for flag in flags},
        )

    def export_tensors(self, frozen: FrozenTarget) -> dict[str, torch.Tensor]:
        """Embedding and head are always written: some loaders fill a missing one with garbage without a word."""
        return {
            **self.state_dict(),
            "embed_tokens.weight": frozen.embedding_weight,
            "lm_head.weight": self.head(frozen),
        }


def draft_ids(t2d: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Ids of the target's vocabulary → ids of the draft vocabulary, -1 for those outside. t2d: bool [V]."""
    return torch.where(t2d[tokens], (t2d.cumsum(0) - 1)[tokens], -1)


def draft_layer_config(target_config, num_layers: int) -> LlamaConfig:
    """A Llama-shaped layer with the target's widths, head counts and RoPE (theta, scaling and length included)."""
    heads = target_config.num_attention_heads
    return LlamaConfig(
        vocab_size=target_config.vocab_size,
        hidden_size=target_config.hidden_size,
        intermediate_size=target_config.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(target_config, "num_key_value_heads", None) or heads,
        head_dim=getattr(target_config, "head_dim", None) or target_config.hidden_size // heads,
        hidden_act="silu",
        max_position_embeddings=target_config.max_position_embeddings,
        rms_norm_eps=getattr(target_config, "rms_norm_eps", 1e-6),
        rope_parameters={
            k: v for k, v in dict(target_config.rope_parameters).items() if k != "partial_rotary_factor"
        },
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
