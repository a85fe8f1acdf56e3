"""The shape of a drafter's own layers: the target's where that is a plain dense one, else by the rules below.

Letters: H width.

* Heads, KV heads, head size: the target's. A target with latent attention (DeepSeek, Kimi) has as many KV heads as heads on
  paper, and a drafter that copied them would have a cache 8 times as large as others' drafters: such a target, and one
  whose layers have no heads, gives heads of 128 (fewer if there would be less than four) over the width H, and at most 8
  KV heads. Llama's config wants heads that divide H: where the target's do not, the largest number below that does.
  Where layers differ (Gemma 4), the first is followed.
* MLP: the target's dense width; of a mixture of experts without one, what a token meets (experts per token and shared
  ones), at most 8·H; else 8/3·H, rounded up to a multiple of 64.
* RoPE: the target's theta over the whole head, with its scaling if that is a constant (linear, llama3, yarn). Factors that
  depend on the longest text of a batch (longrope, dynamic) are not taken over: a pack in training and a batch in decoding
  would be given different ones. Nor are sections for images.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.activations import ACT2FN

from data_pipelines.errors import UserError, check_choice

from .base import DrafterConfig

# The keys of a drafter's layers, beside the shape, that follow the target unless `drafter.layer` has them.
LAYER_KEYS = ("model_type", "rms_norm_eps", "rope_parameters", "max_position_embeddings")
_FAMILIES = {"llama": LlamaConfig, "qwen3": Qwen3Config}
FULL, SLIDING = "full_attention", "sliding_attention"
# Families whose attention norms queries and keys per head.
QK_NORMED = (
    *("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_vl_text", "qwen3_vl_moe_text"),
    *("qwen4_exp_text", "gemma3", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text"),
)
KV_HEADS = 8  # at most, where the target has no number to follow
HEAD_SIZES = (128, 64, 32, 16, 8)
POSITIONS = 131072  # where the target names no limit
# Scalings that are the same whatever texts are computed together, and what they are made of.
STATIC_ROPE = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim"),
        *("beta_fast", "beta_slow", "truncate"),
    ),
}
log = logging.getLogger(__name__)


@dataclass
class ShapeConfig(DrafterConfig):
    """Layers of a shape of their own: heads, kv_heads, head_dim, mlp_width; 0: as the target's, see `shape` for those that
    cannot be followed. activation: of the MLP, by transformers' name.
    """

    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    mlp_width: int = 0
    activation: str = "silu"

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("heads", "kv_heads", "head_dim", "mlp_width"):
            if getattr(self, key) < 0:
                raise UserError(
                    f"drafter.{key}={getattr(self, key)}", fix="give a positive number, or 0 for the default"
                )
        check_choice("drafter.activation", self.activation, ACT2FN)


def draft_layer_config(
    config: ShapeConfig, num_layers: int, target_config, family: type[PretrainedConfig] = LlamaConfig, **options
) -> PretrainedConfig:
    """The transformers config of a drafter's layers. family: Llama's, or Qwen3's, which norms queries and keys.

    Raises UserError on heads that do not fit together.
    """
    own = config.layer
    for key in own:
        if key not in LAYER_KEYS:
            raise UserError(f"drafter.layer.{key} is no key of the layers", fix=f"there are {', '.join(LAYER_KEYS)}")
    family = _FAMILIES.get(own.get("model_type"), family)
    heads, kv_heads, head_dim = _attention(config, target_config, family)
    positions = own.get("max_position_embeddings") or _number(target_config, "max_position_embeddings", "n_positions")
    return family(
        vocab_size=target_config.vocab_size,
        hidden_size=target_config.hidden_size,
        intermediate_size=config.mlp_width or _mlp_width(target_config),
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_act=config.activation,
        max_position_embeddings=positions or POSITIONS,
        rms_norm_eps=own.get("rms_norm_eps") or getattr(target_config, "rms_norm_eps", None) or 1e-6,
        rope_parameters=own.get("rope_parameters") or draft_rope(target_config),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **options,
    )


def layer_family(target_config) -> type[PretrainedConfig]:
    """Of the two kinds of layers that engines serve, the one that is like the target's: with norms on queries and keys
    (Qwen3's), or without (Llama's)."""
    normed = target_config.model_type in QK_NORMED or getattr(target_config, "use_qk_norm", False) is True
    return Qwen3Config if normed else LlamaConfig


def shape_keys(layer: dict[str, Any]) -> dict[str, Any]:
    """A `transformer_layer_config` → the keys of a ShapeConfig that build it."""
    return {
        "heads": layer["num_attention_heads"],
        "kv_heads": layer["num_key_value_heads"],
        "head_dim": layer["head_dim"],
        "mlp_width": layer["intermediate_size"],
        "activation": layer["hidden_act"],
    }


def draft_rope(target_config) -> dict[str, Any]:
    """rope_parameters of a drafter's layers."""
    rope = getattr(target_config, "rope_parameters", None) or {}
    # Some families have one set per kind of layer; a drafter looks as far back as their full layers do.
    nested = [part for part in rope.values() if isinstance(part, dict)]
    if nested:
        rope = rope.get(FULL) or nested[0]
    plain = {
        "rope_type": "default",
        "rope_theta": rope.get("rope_theta") or getattr(target_config, "rope_theta", None) or 10000.0,
    }
    kind = rope.get("rope_type") or "default"
    if kind in STATIC_ROPE:
        scaling = {key: rope[key] for key in STATIC_ROPE[kind] if rope.get(key) is not None}
        return {**plain, "rope_type": kind, **scaling}
    if kind != "default":
        log.info(
            "the target's RoPE is of the kind %s; the drafter's is plain, with the same theta (%g)",
            *(kind, plain["rope_theta"]),
        )
    return plain


def check_layer_types(layer_types: list[str], num_layers: int) -> None:
    if layer_types and (len(layer_types) != num_layers or not {*layer_types} <= {FULL, SLIDING}):
        raise UserError(
            f"drafter.layer_types={layer_types}", fix=f"name {FULL} or {SLIDING} for each of the {num_layers} layers"
        )


def warn_of_engines(shape: PretrainedConfig) -> None:
    """Say what of an exported shape vLLM 0.32 does not serve."""
    if shape.hidden_act != "silu":
        log.warning("vLLM serves drafters with SiLU only; this one's activation is %s", shape.hidden_act)
    if shape.head_dim % 8 or shape.head_dim > 256:
        log.warning(
            "vLLM's attention takes head sizes up to 256 that are multiples of 8; this drafter's is %d", shape.head_dim
        )
    kinds = set(getattr(shape, "layer_types", None) or [])
    if len(kinds) > 1:
        log.warning(
            "vLLM serves a drafter with sliding and full layers with VLLM_USE_V2_MODEL_RUNNER=1 only; with one kind of layer "
            "it serves it anyway"
        )


def _attention(config: ShapeConfig, target_config, family) -> tuple[int, int, int]:
    """Heads, KV heads and head size."""
    size = target_config.hidden_size
    heads, kv_heads, head_dim = _followed(target_config, family) or _own(size, config.head_dim)
    heads, head_dim = config.heads or heads, config.head_dim or head_dim
    kv_heads = config.kv_heads or _divisor(heads, kv_heads)
    if heads % kv_heads:
        raise UserError(
            f"drafter.kv_heads={kv_heads} does not divide the drafter's {heads} heads",
            fix="each KV head serves the same number of heads: choose drafter.heads and drafter.kv_heads accordingly",
        )
    if head_dim % 2:
        raise UserError(f"drafter.head_dim={head_dim} is odd", fix="RoPE rotates pairs: choose an even head size")
    if family is LlamaConfig and size % heads:
        raise UserError(
            f"drafter.heads={heads} does not divide the width, {size}, as a Llama layer's must",
            fix=f"drafter.heads={_divisor(size, heads)}, or another divisor; drafter.head_dim is free",
        )
    return heads, kv_heads, head_dim


def _followed(target_config, family) -> tuple[int, int, int] | None:
    """The target's own, if that is a plain shape."""
    size, heads = target_config.hidden_size, getattr(target_config, "num_attention_heads", None)
    if not isinstance(heads, int) or heads < 1 or getattr(target_config, "kv_lora_rank", None):
        return None
    kv_heads = _number(target_config, "num_key_value_heads", "num_kv_heads") or heads
    head_dim = _number(target_config, "head_dim")
    if head_dim is None and size % heads:
        return None
    if family is LlamaConfig and size % heads:
        heads = next((n for n in range(heads, 0, -1) if size % n == 0 and n % kv_heads == 0), _divisor(size, heads))
    return heads, kv_heads, head_dim or size // heads


def _own(size: int, head_dim: int) -> tuple[int, int, int]:
    head_dim = head_dim or next((d for d in HEAD_SIZES if size % d == 0 and size // d >= 4), 2)
    heads = _divisor(size, max(1, size // head_dim))
    return heads, _divisor(heads, KV_HEADS), head_dim


def _mlp_width(target_config) -> int:
    width = _number(target_config, "intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
    expert = _number(target_config, "moe_intermediate_size", "expert_intermediate_size")
    experts = _number(target_config, "n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
    if width and (expert or not experts):
        return width
    expert = expert or width
    if experts and expert:
        active = _number(target_config, "num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts") or 1
        shared = _number(target_config, "shared_expert_intermediate_size", "shared_intermediate_size")
        shared = shared or expert * (_number(target_config, "n_shared_experts") or 0)
        return min(expert * active + shared, 8 * target_config.hidden_size)
    return -(-8 * target_config.hidden_size // (3 * 64)) * 64


def _divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)


def _number(config, *names: str) -> int | None:
    """The first of these keys that is a positive integer; where layers differ, the first one's."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # transformers refuses a key in which layers differ
            value = getattr(config.per_layer_config[0], name, None)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
