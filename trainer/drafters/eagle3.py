"""EAGLE-3 with training-time test (Li et al. 2025, arXiv 2503.01840), and its 3.1 options.

Letters: A taps, H width, D draft vocabulary, V vocabulary, K draft steps. Which row reads and predicts what: `rollout`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from data_pipelines.errors import UserError

from ..target import FrozenTarget
from .base import Contract, check_taps, default_taps
from .cost import FIRST, TRAINED, AttentionShape, Flops, elements, matrix_elements
from .layers import DraftLayer, FusionLayer, Rotary, init_linears
from .rollout import RolloutDrafter
from .rollout_cost import merged_flops, recomputed
from .shape import (
    FULL,
    SLIDING,
    ShapeConfig,
    check_layer_types,
    draft_layer_config,
    layer_family,
    shape_keys,
    warn_of_engines,
)


@dataclass
class Eagle3Config(ShapeConfig):
    """taps: the target layers that feed the drafter; empty: [2, L//2, L-3]. steps: K of the training-time test.
    step_weight: a draft of step k weighs step_weight**k.

    norm_before_fc (one norm over the concatenated taps) and fc_norm (one per tap) exclude each other. norm_output feeds
    the normed output back; with fc_norm that is EAGLE-3.1. train_head: else the head stays the target's rows.

    sliding_window: how many positions a query sees, its own included; 0: all. layer_types: of each layer, full_attention or
    sliding_attention; empty: all slide if there is a window.
    """

    training = ShapeConfig.training | {"steps", "step_weight"}

    name: str = "eagle3"
    taps: list[int] = field(default_factory=list)
    num_layers: int = 1
    steps: int = 7
    step_weight: float = 0.8
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    train_head: bool = False
    sliding_window: int = 0
    layer_types: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm_before_fc and self.fc_norm:
            raise UserError("drafter.norm_before_fc and drafter.fc_norm exclude each other", fix="choose one")
        for key in ("steps", "num_layers"):
            if getattr(self, key) < 1:
                raise UserError(f"drafter.{key}={getattr(self, key)}; it must be at least 1")
        check_layer_types(self.layer_types, self.num_layers)
        if SLIDING in self.layer_types and not self.sliding_window:
            raise UserError(f"drafter.layer_types has a {SLIDING}", fix="set drafter.sliding_window=<positions>")
        if self.sliding_window and self.sliding_window < self.steps:  # the row that a chain starts from stays in sight
            raise UserError(
                f"drafter.sliding_window={self.sliding_window} is shorter than the {self.steps} draft steps",
                fix="use a window of at least drafter.steps positions, or 0 for none",
            )


class Eagle3(RolloutDrafter):
    Config = Eagle3Config
    narrows = True

    def __init__(self, config: Eagle3Config, target_config, kept: torch.Tensor | None):
        super().__init__()
        self.config, self.depth, self.attending = config, config.steps, config.num_layers
        self.step_weights = [config.step_weight**k for k in range(config.steps)]
        self.taps = self.contract(config, target_config.num_hidden_layers).taps
        self.set_vocabulary(kept, target_config.vocab_size)
        self.layer_types = config.layer_types or [SLIDING if config.sliding_window else FULL] * config.num_layers
        windows = {}
        if SLIDING in self.layer_types:
            windows = {
                "layer_types": self.layer_types,
                "sliding_window": config.sliding_window,
                "use_sliding_window": True,
            }
        family = layer_family(target_config)
        self.layer_config = shape = draft_layer_config(config, config.num_layers, target_config, family, **windows)
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
        init_linears(self)
        self.lm_head = nn.Linear(size, self.draft_vocab_size, bias=False) if config.train_head else None

    @classmethod
    def contract(cls, config: Eagle3Config, num_layers: int) -> Contract:
        return Contract(check_taps(tuple(config.taps) or default_taps(num_layers), num_layers))

    def final_norms(self):
        return [self.norm]

    def start_head(self, frozen: FrozenTarget) -> None:
        super().start_head(frozen)
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

    def body_flops(self, work, recompute):
        normed_first = self.config.norm_before_fc or self.config.fc_norm
        total = Flops((TRAINED if normed_first else FIRST) * self.fc.weight.numel() * work.tokens)
        shape, last = self.layer_config, len(self.layers) - 1
        score = AttentionShape(shape.num_attention_heads, shape.head_dim, shape.head_dim)
        for i, layer in enumerate(self.layers):
            keys = elements([layer.self_attn.k_proj, layer.self_attn.v_proj])
            rest = matrix_elements(layer, 1.0) - keys
            queries = work.rows[0] if i == last else work.tokens  # the first step of the last layer
            later = sum(work.rows[1:])
            total += Flops(TRAINED * (keys * (work.tokens + later) + rest * (queries + later)))
            first = work.pairs[0] if i == last else work.all_pairs
            total += merged_flops(score, first + sum(work.pairs[1:]))
        return recomputed(total) if recompute else total

    def start(self, taps, final, frozen):
        return self.fuse(taps)

    def run_layers(self, embeds, hidden, positions, attentions, rows=None):
        rope = self.rotary(positions)
        last = len(self.layers) - 1
        if rows is not None:
            attentions[last].narrow(rows)  # the last layer's queries; the others' outputs are its keys
        hidden = self.layers[0](embeds, hidden, rope, attentions[0], rows if last == 0 else None)
        for i in range(1, last + 1):
            hidden = self.layers[i](hidden, rope, attentions[i], rows if i == last else None)
        return hidden

    def window(self, layer):
        return self.config.sliding_window if self.layer_types[layer] == SLIDING else None

    def normed(self, hidden):
        return self.norm(hidden)

    @property
    def feeds_normed(self) -> bool:
        return self.config.norm_output

    # ---- export (speculators format, eagle3)

    def export_config(self, frozen: FrozenTarget) -> dict[str, Any]:
        config = self.config
        warn_of_engines(self.layer_config)
        layer = {
            **self.layer_config.to_diff_dict(),
            "model_type": self.layer_config.model_type,
            "vocab_size": self.vocab_size,
        }
        if len(self.taps) != 3:  # vLLM's Llama class assumes three otherwise
            layer["num_aux_hidden_states"] = len(self.taps)
        return {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3DraftModel"],
            "draft_vocab_size": self.draft_vocab_size,
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
        """How the drafter was trained does not come with an export."""
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        layer = exported["transformer_layer_config"]
        windows, window = {}, layer.get("sliding_window")
        if SLIDING in (layer.get("layer_types") or []):
            steps = min(Eagle3Config.steps, window)
            windows = {"sliding_window": window, "layer_types": layer["layer_types"], "steps": steps}
        return Eagle3Config(
            taps=exported["eagle_aux_hidden_state_layer_ids"],
            num_layers=layer["num_hidden_layers"],
            **shape_keys(layer),
            **windows,
            draft_vocab_size=exported["draft_vocab_size"],
            **{flag: exported[flag] for flag in flags},
        )

    def export_tensors(self, frozen: FrozenTarget) -> dict[str, torch.Tensor]:
        """Embedding and head are always written: some loaders fill a missing one with garbage without a word."""
        return {
            **self.state_dict(),
            "embed_tokens.weight": frozen.embedding_weight,
            "lm_head.weight": self.head(frozen),
        }
