"""The shape of a drafter's own layers: the target's, the rules where that is no plain dense shape, and the keys."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AutoConfig, Gemma4TextConfig, LlamaConfig, Qwen3Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from data_pipelines.engines.anatomy import text_config
from data_pipelines.errors import UserError
from tests.trainer.families import FAMILIES, NATIVE
from trainer.drafters import build_drafter
from trainer.drafters.dflash import DFlashConfig
from trainer.drafters.eagle3 import Eagle3Config
from trainer.drafters.layers import Rotary
from trainer.drafters.shape import ShapeConfig, draft_layer_config, draft_rope, layer_family

NO_DECODER = (
    "blt",
    "gemma4_assistant",
    "gemma4_unified_assistant",
)  # their config has no width: several models, or a part
NO_DEFAULT = ("musicgen", "musicgen_melody")  # their config cannot be made without arguments


def of(model_type: str, **keys):
    return text_config(AutoConfig.for_model(model_type, **keys))


def shape(target_config, **keys) -> tuple[int, int, int, int]:
    """Heads, KV heads, head size, MLP width."""
    made = draft_layer_config(ShapeConfig(**keys), 1, target_config, layer_family(target_config))
    return made.num_attention_heads, made.num_key_value_heads, made.head_dim, made.intermediate_size


@pytest.mark.parametrize("name", sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*NO_DECODER, *NO_DEFAULT}))
def test_every_family_gives_layers_that_can_be_built(name):
    """Each family's config as transformers has it by default: layers of both kinds, with frequencies for their heads."""
    target = of(name)
    for family in (LlamaConfig, Qwen3Config):
        made = draft_layer_config(ShapeConfig(), 2, target, family)
        assert made.num_attention_heads % made.num_key_value_heads == 0
        assert made.hidden_size == target.hidden_size and made.hidden_size < 100 * made.intermediate_size
        assert made.intermediate_size <= 16 * made.hidden_size
        assert made.max_position_embeddings > 0
        cos, _ = Rotary(made)(torch.tensor([0, 5]))
        assert cos.shape == (2, made.head_dim)


def test_a_plain_target_is_followed():
    assert shape(LlamaConfig(hidden_size=96, intermediate_size=200, num_attention_heads=6, num_key_value_heads=2)) == (
        *(6, 2, 16),
        200,
    )
    wide = Qwen3Config(hidden_size=64, intermediate_size=200, num_attention_heads=8, num_key_value_heads=2, head_dim=32)
    assert shape(wide) == (8, 2, 32, 200)  # heads need not add up to the width


def test_latent_attention_does_not_give_as_many_kv_heads_as_heads():
    """DeepSeek-V3: 128 heads, each with keys and values on paper. Copied, the drafter's cache would be 16 times as large."""
    deepseek = of("deepseek_v3")
    assert deepseek.num_key_value_heads == 128
    assert shape(deepseek) == (56, 8, 128, 18432)
    assert shape(of("deepseek_v3", hidden_size=32)) == (4, 4, 8, 18432)


def test_heads_that_do_not_divide_the_width():
    """GLM-4.5 and Seed-OSS. A Llama layer wants them to; a Qwen3 layer does not."""
    glm = {"hidden_size": 5120, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128}
    assert shape(of("glm4_moe", **glm))[:3] == (80, 8, 128)
    assert shape(of("glm4_moe", **glm, use_qk_norm=True))[:3] == (96, 8, 128)
    assert shape(of("seed_oss"))[:3] == (64, 8, 128)


def test_experts_give_the_width_that_a_token_meets():
    assert of("qwen3_5_moe").moe_intermediate_size == 512
    assert shape(of("qwen3_5_moe"))[3] == 8 * 512 + 512  # with the shared expert
    assert shape(of("gpt_oss"))[3] == 4 * 2880  # its intermediate_size is one expert's
    assert shape(of("qwen3_moe"))[3] == 6144  # a dense width is there
    assert shape(of("deepseek_v3"))[3] == 18432
    assert shape(of("olmoe", hidden_size=64, intermediate_size=512))[3] == 8 * 64  # no wider than 8·H
    assert shape(of("gpt2"))[3] == 2048  # 8/3·768


def test_gemma4_whose_layers_differ():
    config = Gemma4TextConfig(hidden_size=64, num_hidden_layers=6, head_dim=16, global_head_dim=32)
    with pytest.raises(RuntimeError):
        _ = config.head_dim
    assert shape(config)[2] == 16
    assert draft_rope(config) == {"rope_type": "default", "rope_theta": 1e6}


def test_the_keys_are_what_is_built(world):
    keys = {"heads": 6, "kv_heads": 3, "head_dim": 4, "mlp_width": 20, "activation": "gelu"}
    for name in ("eagle3", "dflash"):
        options = {"mask_token": 1} if name == "dflash" else {}
        config = {"eagle3": Eagle3Config, "dflash": DFlashConfig}[name](**keys, **options)
        drafter = build_drafter(config, LlamaConfig(hidden_size=24, num_attention_heads=4, vocab_size=61), None)
        layer = drafter.layers[0]
        assert layer.self_attn.q_proj.out_features == 24 and layer.self_attn.k_proj.out_features == 12
        assert layer.mlp.gate_proj.out_features == 20 and isinstance(layer.mlp.act_fn, torch.nn.Module)
        assert type(layer.mlp.act_fn).__name__ == "GELUActivation"


PLAIN = LlamaConfig(hidden_size=96, num_attention_heads=6, num_key_value_heads=2)


def test_a_part_of_the_keys_keeps_the_rest_of_the_target():
    assert shape(PLAIN, heads=8)[:3] == (8, 2, 16)
    assert shape(PLAIN, heads=3)[:3] == (3, 1, 16)  # the largest number of KV heads below the target's that fits
    assert shape(PLAIN, kv_heads=3)[:3] == (6, 3, 16)
    assert shape(PLAIN, head_dim=32)[:3] == (6, 2, 32)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"kv_heads": 4}, "drafter.kv_heads=4 does not divide the drafter's 6 heads"),
        ({"heads": 7}, "drafter.heads=7 does not divide the width, 96, .*drafter.heads=6, or"),
        ({"head_dim": 15}, "drafter.head_dim=15 is odd"),
        ({"heads": -1}, "drafter.heads=-1"),
        ({"activation": "swish2"}, "drafter.activation"),
    ],
)
def test_what_does_not_fit_is_said(keys, said):
    with pytest.raises(UserError) as refused:
        shape(PLAIN, **keys)
    assert re.search(said, " ".join(str(refused.value).split()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layer_types": ["sliding_attention"]}, "drafter.sliding_window="),
        ({"layer_types": ["sliding"]}, "drafter.layer_types="),
        ({"sliding_window": 6}, "shorter than the 7 draft steps"),
    ],
)
def test_windows_that_do_not_fit_are_said(options, said):
    with pytest.raises(UserError, match=said):
        Eagle3Config(**options)


LONG = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 4.0}
ROPES = {
    "default": ({"rope_type": "default"}, "default"),
    "partial": ({"rope_type": "default", "partial_rotary_factor": 0.5}, "default"),
    "for images": ({"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True}, "default"),
    "linear": ({"rope_type": "linear", "factor": 2.0}, "linear"),
    "llama3": (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        "llama3",
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0},
        "yarn",
    ),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, "default"),
    "longrope": ({"rope_type": "longrope", **LONG, "original_max_position_embeddings": 64}, "default"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_do_not_depend_on_what_is_computed_together(name, caplog):
    rope, kept = ROPES[name]
    target = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=128, rope_parameters={**rope, "rope_theta": 5e4}
    )
    with caplog.at_level("INFO"):
        made = draft_layer_config(ShapeConfig(), 1, target, LlamaConfig)
    assert (made.rope_parameters["rope_type"], made.rope_parameters["rope_theta"]) == (kept, 5e4)
    assert ("the drafter's is plain" in caplog.text) == (name in ("dynamic", "longrope"))
    rotary = Rotary(made)
    short = torch.arange(20)
    alone = rotary(short)
    beside_a_long_one = rotary(torch.cat([short, torch.arange(140)]))
    assert all(torch.equal(a, b[:20]) for a, b in zip(alone, beside_a_long_one))
    if name in ("dynamic", "longrope"):  # the target's own do
        own = Rotary(target)
        assert not torch.equal(own(short)[0], own(torch.arange(140))[0][:20])


@pytest.mark.parametrize("name", [*FAMILIES, *NATIVE])
def test_families_have_the_targets_theta(name):
    target = {**FAMILIES, **NATIVE}[name]()
    rope = target.rope_parameters
    assert draft_rope(target)["rope_theta"] == rope.get("full_attention", rope)["rope_theta"]


def test_what_vllm_does_not_serve_is_said(world, caplog):
    for keys, said in (
        ({"activation": "gelu"}, "SiLU only"),
        ({"head_dim": 12}, "multiples of 8"),
        (
            {"num_layers": 2, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
            "V2_MODEL_RUNNER",
        ),
        ({"num_layers": 2, "sliding_window": 8}, ""),
        ({}, ""),
    ):
        caplog.clear()
        world.drafter(**keys).export_config(world.frozen)
        assert said in caplog.text and bool(said) == bool(caplog.records)
