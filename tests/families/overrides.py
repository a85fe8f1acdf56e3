"""What the rules of `shrink` cannot know about a model class, each with its reason.

Keys are dotted paths into the shrunk config; DROP leaves a key to the class's own default.
"""

from __future__ import annotations

from typing import Any

from transformers import Gemma4TextConfig, Gemma4VisionConfig

from .shrink import DROP, shrink

_SLIDING = ["sliding_attention", "full_attention"] * 2
_GEMMA4 = {
    # The class derives the shape of its full-attention layers from layer_types.
    "layer_types": _SLIDING,
    "num_hidden_layers": 4,
    "per_layer_config": DROP,
    "global_head_dim": 32,
}
_COMPASS = {  # the class has no default for the RoPE of a kind of layers
    "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
}
_QWEN_VL = {  # the class has no default; sums up to half the head size
    "text_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
}
_QWEN4 = {  # published configs give the indexer's shape, the class does not
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 16,
}
_ASSISTANT = {  # no default for the text config, of which these four are demanded
    **shrink(Gemma4TextConfig()),
    **{k: v for k, v in _GEMMA4.items() if v is not DROP},
    "model_type": "gemma4_text",
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 4,
    "enable_moe_block": False,
}
_ASSISTANT.pop("per_layer_config")

# Half of the head is rotated, and the default has no sections for three axes of positions.
_GLM_V = {
    "text_config.rope_parameters.mrope_section": [2, 1, 1],
    "text_config.rope_parameters.partial_rotary_factor": 0.5,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "CohereCompassForCausalLM": _COMPASS,
    "CohereCompassForConditionalGeneration": {f"text_config.{k}": v for k, v in _COMPASS.items()},
    "DbrxForCausalLM": {"attn_config.rope_theta": 1e4},  # read by the class, not among its defaults
    "FalconH1ForCausalLM": {"mamba_d_ssm": 128},  # has to be heads × head size
    "Mamba2ForCausalLM": {"num_heads": 8},  # heads × head size has to be twice the width
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention", "conv"]},  # no default
    "ReformerModelWithLMHead": {  # sizes that have to multiply and sum up to others
        "axial_pos_embds_dim": [16, 48],
        "axial_pos_shape": [8, 16],
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "num_hidden_layers": 4,
    },
    "ZambaForCausalLM": {  # needs two hybrid layers to share weights between
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 5,
        "attention_hidden_size": 128,  # twice the width
        "attention_head_dim": 32,
    },
    "ZayaForCausalLM": {"num_experts_per_tok": 1},  # the only value that the class takes
    "Gemma4ForCausalLM": {**_GEMMA4, "num_kv_shared_layers": 2},
    "Gemma4ForConditionalGeneration": {f"text_config.{k}": v for k, v in _GEMMA4.items()},
    "Gemma4UnifiedForCausalLM": _GEMMA4,
    "Gemma4UnifiedForConditionalGeneration": {f"text_config.{k}": v for k, v in _GEMMA4.items()},
    "Gemma4AssistantForCausalLM": {"text_config": _ASSISTANT},
    "Gemma4UnifiedAssistantForCausalLM": {"text_config": {**_ASSISTANT, "model_type": "gemma4_unified_text"}},
    "DiffusionGemmaForBlockDiffusion": {
        **{f"text_config.{k}": v for k, v in _GEMMA4.items()},
        "vision_config": {**shrink(Gemma4VisionConfig()), "model_type": "gemma4_vision"},  # no default
    },
    "Qwen4ExpForCausalLM": _QWEN4,
    "Qwen4ExpForConditionalGeneration": {f"text_config.{k}": v for k, v in _QWEN4.items()},
    # A vocabulary of image tokens, without a default.
    "ChameleonForConditionalGeneration": {"vocabulary_map": {"<image>": 118, "IMGIMGA": 117}},
    "Emu3ForConditionalGeneration": {"vocabulary_map": {"<image>": 118, "<|extra_200|>": 117}},
    "DeepseekOcr2ForConditionalGeneration": {"text_config.mlp_layer_types": ["dense", "sparse", "sparse"]},  # no default
    "Ernie4_5_VLMoeForConditionalGeneration": {  # without a default; sums up to half the head size
        "text_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
    },
    "Qwen2VLForConditionalGeneration": _QWEN_VL,
    "Qwen2_5_VLForConditionalGeneration": _QWEN_VL,
    "Qwen2_5OmniThinkerForConditionalGeneration": _QWEN_VL,
    "PaddleOCRVLForConditionalGeneration": _QWEN_VL,
    "Glm4vForConditionalGeneration": _GLM_V,
    "Glm4vMoeForConditionalGeneration": _GLM_V,
    "Glm46VForConditionalGeneration": _GLM_V,
    "Mistral4ForCausalLM": {"head_dim": 32},  # both parts of a query's head, half of which is rotated
    "HunYuanVLForConditionalGeneration": {  # no default
        "text_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2, 2]}
    },
    "GlmOcrForConditionalGeneration": _GLM_V,
    "Zamba2ForCausalLM": {  # twice the width; the layers that share weights have to be the list's hybrid ones
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"],
        "hybrid_layer_ids": [2],
    },
    "Granite4VisionForConditionalGeneration": {  # the default text config is a Llama's, which the class cannot use
        "text_config.model_type": "granite4_vision_text",
        "deepstack_layer_map": [],
        "downsample_rate": "2/4",
        "spatial_target_layers": [0, 1, 2, 2],
    },
    "FunAsrNanoForConditionalGeneration": {"adaptor_config.intermediate_size": 16},  # a quarter of the width
    "KyutaiSpeechToTextForConditionalGeneration": {"codec_config.upsample_groups": 4},  # divides the width
    "Qwen3OmniMoeForConditionalGeneration": {  # no defaults
        "talker_config.text_config.shared_expert_intermediate_size": 32,
        "talker_config.spatial_merge_size": 2,
        "code2wav_config.decoder_dim": 64,
    },
    "VibeVoiceAsrForConditionalGeneration": {  # channels double with every stage of the codec
        f"{codec}_tokenizer_encoder_config.{k}": v
        for codec in ("acoustic", "semantic")
        for k, v in {"num_filters": 2, "depths": [1] * 7}.items()
    },
}  # fmt: skip
