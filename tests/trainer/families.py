"""Tiny random targets of the families that drafters must follow, as checkpoints on disk."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from data_pipelines.engines import Target

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SLIDING = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "llama": lambda: LlamaConfig(**SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0}),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen3": lambda: Qwen3Config(**SHAPE),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SHAPE, **EXPERTS),
    # Windows shorter than the texts: a window counted in the wrong rows would show.
    "gemma2": lambda: Gemma2Config(
        **SHAPE,
        layer_types=SLIDING,
        sliding_window=7,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(**SHAPE, layer_types=SLIDING, sliding_window=7, query_pre_attn_scalar=16),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=7),
    "gpt_oss": lambda: GptOssConfig(
        **{**SHAPE, "intermediate_size": 24},
        layer_types=SLIDING,
        sliding_window=7,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32},
    ),
    "phi3": lambda: Phi3Config(**SHAPE, partial_rotary_factor=0.5),
}
# Families whose checkpoints bring an MTP head along.
NATIVE = {
    "qwen3_next": lambda: Qwen3NextConfig(
        **SHAPE,
        **EXPERTS,
        shared_expert_intermediate_size=24,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**SHAPE, "num_key_value_heads": 4},
        moe_intermediate_size=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=12,
    ),
}


def build_target(config: PretrainedConfig, folder: Path, seed: int = 0) -> Target:
    """A random model of this config, saved to `folder`."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # norms of 1 (or of 1 + 0), zero biases and sinks would hide what is not computed
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.1)
    model.save_pretrained(folder)
    return Target(str(folder), f"tests/{config.model_type}")
