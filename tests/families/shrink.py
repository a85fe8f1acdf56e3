"""Tiny configs out of the defaults of a config class, by rules on the names of its keys.

Letters: L layers, V vocabulary.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import PretrainedConfig

VOCABULARY = 128  # a power of two, as codebooks are
ORDINARY_TOKENS = 80  # ids from 0; special tokens lie above
LAYERS = 3
CONTEXT = 256
_DROPPED = re.compile(
    r"model_type|transformers_version|architectures|_name_or_path|dtype|id2label|label2id|.*pruned_heads|is_encoder_decoder"
    r"|output_hidden_states|output_attentions|return_dict|problem_type|chunk_size_feed_forward"
)
_DEPTH = re.compile(r"num_hidden_layers|n_layers?|num_layers|decoder_layers|num_decoder_layers|layers|num_blocks")
# (keys, value): the first rule that knows a key decides. A value may be a function of the default.
_WIDTH, _HEADS, _KV_HEADS, _HEAD = 64, 4, 2, 16
RULES: list[tuple[str, Any]] = [
    (r"(num_|decoder_|encoder_|n_)?(hidden_)?layers?|depth|num_(hidden_|decoder_|encoder_)?layers|num_blocks", LAYERS),
    (r"(decoder_|encoder_|max_2d_)?vocab_size(_per_layer_input)?|alt_vocab_size|text_vocab_size", VOCABULARY),
    (r"(text_|encoder_|decoder_|thinker_|image_text_|backbone_|out_|vision_|attention_)?hidden_size", _WIDTH),
    (r"d_model|n_embd|(text_)?embed_dim|embedding_(size|dim)|word_embed_proj_dim|output_dim|lru_width|emb_dim", _WIDTH),
    (r"hidden_size_global", _WIDTH),
    (r"(input|output)_embedding_size|projection_dim|(projector|projection|merged|vision_output)_.*(size|dim)", _WIDTH),
    (r"(num_|n_|decoder_|encoder_|num_decoder_|num_encoder_|conf_num_|num_sliding_|swa_num_)?(attention_)?heads?", _HEADS),
    (r"n_head|num_global_attention_heads", _HEADS),
    (r"(num_|swa_num_|num_global_|n_|kv_n_)?(key_value|kv)_heads|multi_query_group_num|kv_n_heads|index_n_heads", _KV_HEADS),
    (r"(mamba_)?(n|num)_heads|mamba_n_heads|mamba_num_heads", 2 * _HEADS),
    (r"mamba_(d_head|head_dim|headdim)", _HEAD),
    (r"n_groups|mamba_n_?groups", lambda n: min(n, 2)),
    (r"(mrope|xdrope)_section", lambda section: [4, 2, 2] if len(section) == 3 else [2, 2, 2, 2]),
    (r"(attention_|swa_|global_|index_|resampler_|linear_|linear_key_|linear_value_)?head_dim", _HEAD),
    (r"kv_channels|d_kv|d_head|dim_head", _HEAD),
    (r"moe_intermediate_size|.*shared.*intermediate_size|expert_ffn_hidden_size|share_expert_dim|router_hidden_size", 32),
    (r".*intermediate_size(_mlp)?|.*ffn_dim|n_inner|ffn_hidden_size|d_ff|dff|dim_ff|mlp_dim|feed_forward_size|d_inner", 96),
    (r"num_(local_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_k|moe_top_?k|top_k_experts|num_experts_per_token", 2),
    (r"moe_top_k|top_k", 1),
    (r"(n|num)_shared_experts|moe_num_shared_experts", lambda n: min(n, 1)),
    (r"n_group|num_expert_group|topk_group", lambda n: min(n, 2) if n > 1 else n),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", lambda n: min(n, 1)),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank|(.*_)?lora_rank|.*_rank", 16),
    (r"qk_rope_head_dim|qk_nope_head_dim", lambda n: n and _HEAD),
    (r"v_head_dim", 12),
    (r"qk_head_dim", 2 * _HEAD),
    (r"rotary_dim", 8),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions|context_length", CONTEXT),
    (r"model_max_length|max_sequence_length|max_source_positions|max_2d_position_embeddings", CONTEXT),
    (r"num_position_embeddings", CONTEXT),
    (r"original_max_position_embeddings", CONTEXT // 2),
    (r"sliding_window(_size)?|local_attention|window_size|attention_window_size|attention_chunk_size|keep_window_size", 16),
    (r"(mamba_)?d_state|state_size|ssm_state_size|mamba_d_state", 8),
    (r"mamba_dt_rank|time_step_rank", 8),
    (r"(mamba_)?chunk_size|mamba_chunk_size", lambda n: min(n, 16)),
    (r"linear_num_(key|value)?_?heads", lambda n: _HEADS),
    (r"index_topk|index_topk_blocks", lambda n: n),
    (r"hidden_size_per_layer_input", 8),
    (r"image_size|max_image_size|min_image_size|max_img_size|crop_size", 56),
    (r"num_image_tokens|image_seq_length|mm_tokens_per_image", 16),
    (r"(pronunciation|shape)_vocab_size|.*codebook_size|codebook_vocab_size|audio_vocab_size|num_embeddings", VOCABULARY),
    (r"(pronunciation|shape)_embed_dim", 16),
    (r"encoder_hash_byte_group_vocab", 50),
    (r"zero_expert_num", 2),
    (r"num_kv_shared_layers", lambda n: min(n, 2)),
    (r"base_channels|(ext_pw_out|nemo_conv|depthwise_separable_out)_channels?|downsample_hidden_size|hidden_dim", 32),
    (r"output_channels|num_filters|upsample_initial_channel|conv_hidden_size", 16),
]  # fmt: skip
# What published configs of a family say where the class itself has no default.
UNSAID = {
    "head_dim": _HEAD,
    "num_key_value_heads": _KV_HEADS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "top_k_experts": 2,
    "clip_qkv": 8.0,
}
# Scales that are 1 by default would hide what is left out.
SCALES = {
    "logits_scaling": 1.7,
    "logit_scale": 0.6,
    "lm_head_multiplier": 0.7,
    "embedding_multiplier": 1.9,
    "residual_multiplier": 0.8,
    "attention_multiplier": 0.3,
    "final_logit_softcapping": 4.0,
    "attn_logit_softcapping": 3.0,
    "logits_soft_cap": 4.0,
    "output_logit_soft_cap": 4.0,
    "output_multiplier": 0.4,
    "logits_mup_width_multiplier": 1.6,
    "dim_model_base": 24,
}
_RULES = [(re.compile(pattern), value) for pattern, value in RULES]
_TOKEN = re.compile(r"(.*token_(id|index|ids)|.*_index|(bos|eos|pad|unk|mask)_id)$")
_NO_TOKEN = re.compile(r"(altup|moe_layer|.*layer).*index")


def tiny_config(cls: type[PretrainedConfig], overrides: dict[str, Any] | None = None) -> PretrainedConfig:
    """The defaults of a config class, shrunk. overrides: dotted keys of the shrunk one → values."""
    shape = shrink(cls())
    for key, value in (overrides or {}).items():
        *path, last = key.split(".")
        node = shape
        for step in path:
            node = node.setdefault(step, {})
        if value is DROP:
            node.pop(last, None)
        else:
            node[last] = value
    return cls(**shape)


DROP = object()


def shrink(config: PretrainedConfig) -> dict[str, Any]:
    """The keys of a config with small values, nested configs included."""
    defaults = config.to_dict()
    depth = next((defaults[k] for k in defaults if _DEPTH.fullmatch(k) and isinstance(defaults[k], int)), None)
    kept = _layers_kept([v for v in defaults.values() if isinstance(v, list) and depth and len(v) == depth], depth)
    special = iter(range(VOCABULARY - 1, ORDINARY_TOKENS, -1))
    shape = {}
    for key, value in defaults.items():
        if _DROPPED.fullmatch(str(key)):
            continue
        nested = vars(config).get(key)
        if isinstance(nested, PretrainedConfig):
            shape[key] = {**shrink(nested), "model_type": nested.model_type}
        elif kept and isinstance(value, list) and len(value) == depth:
            shape[key] = [_small(key, value[i], special) for i in kept]
        elif kept and _DEPTH.fullmatch(key) and isinstance(value, int):
            shape[key] = len(kept)
        else:
            shape[key] = _small(key, value, special)
    # As many heads for keys as for queries: a family that demands it has that as its default.
    if defaults.get("num_key_value_heads") == defaults.get("num_attention_heads") is not None:
        shape["num_key_value_heads"] = _HEADS
    if "is_decoder" in shape:
        shape["is_decoder"] = True
    return shape


def _layers_kept(lists: list[list], depth: int | None) -> list[int]:
    """The layers that stay, LAYERS or more of them: the first of every kind, then the first ones."""
    if not lists:
        return []
    kinds: dict[Any, int] = {}
    for i in range(depth):
        kinds.setdefault(str([values[i] for values in lists]), i)
    firsts = list(kinds.values())[:8]
    rest = [i for i in range(depth) if i not in firsts]
    return sorted(firsts + rest[: max(0, LAYERS - len(firsts))])


def _small(key: str, value: Any, special) -> Any:
    if value is None:
        return UNSAID.get(key)
    if isinstance(value, bool | str):
        return value
    if isinstance(value, dict):
        return {k: _small(str(k), v, special) for k, v in value.items()}
    if key in SCALES and isinstance(value, int | float):
        return SCALES[key]
    if _TOKEN.fullmatch(key) and not _NO_TOKEN.fullmatch(key):
        if isinstance(value, list):
            return [next(special) for _ in value]
        return next(special) if isinstance(value, int) and value >= 0 else value
    if isinstance(value, int) or key.endswith("rope_section"):
        rule = next((small for pattern, small in _RULES if pattern.fullmatch(key)), None)
        if rule is not None:
            return rule(value) if callable(rule) else rule
    if isinstance(value, float) and key == "initializer_range":
        return 0.1
    if isinstance(value, list) and value and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        return [_small(key, v, special) for v in value]
    return value
