"""What vLLM makes of an export's config.json: its own mapping, pure Python, read out of its wheel. (vLLM itself does not run
here. The set-up downloads the wheel of another platform: it is the smallest one, and these files are the same in all.)"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.trainer.export.test_speculators import frozen  # noqa: F401
from trainer.drafters import DRAFTERS, build_drafter
from trainer.export.config import ExportConfig
from trainer.export.speculators import export_drafter

BLOCK = {"num_layers": 2, "block_size": 4, "mask_token": 7, "taps": [2, 3, 5]}
SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.fixture(scope="module")
def mapping():
    """vLLM's SpeculatorsConfig. Its parent packages, which would import all of vLLM, are left empty; afterwards nothing by
    the name of vllm is left for others to find."""
    wheels = list((Path(sys.prefix) / "judges").glob("vllm_tpu-0.32.0-*.whl"))
    assert wheels, "`make setup-test` downloads it"
    before = set(sys.modules)
    for name in ("vllm", "vllm.transformers_utils", "vllm.transformers_utils.configs"):
        package = ModuleType(name)
        package.__path__ = [str(wheels[0] / name.replace(".", "/"))]
        sys.modules[name] = package
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    yield SpeculatorsConfig
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "vllm":
            del sys.modules[name]


@pytest.fixture
def mapped(mapping, tiny_target, frozen, tmp_path):  # noqa: F811
    """Exports a drafter. → what vLLM makes of it: its own speculative config, and the config of the draft model."""

    def make(name, **options):
        config = DRAFTERS[name].Config(**options)
        kept = torch.arange(config.draft_vocab_size) * 2 if config.draft_vocab_size else None
        drafter = build_drafter(config, tiny_target.config, kept)
        out = export_drafter(drafter, frozen, tiny_target, ExportConfig(), tmp_path / "export", drafter.depth)
        exported = json.loads((out / "config.json").read_text())
        assert exported["speculators_config"]["verifier"]["name_or_path"] == tiny_target.name
        return mapping.extract_vllm_speculative_config(exported), mapping.from_pretrained(out)

    return make


def follows_the_target(config, target) -> None:
    """What vLLM builds the draft's layers by, and what it must find to load the target's embedding and head."""
    keys = "vocab_size hidden_size num_attention_heads num_key_value_heads head_dim rms_norm_eps rope_parameters"
    for key in (*keys.split(), "max_position_embeddings"):
        assert getattr(config, key) == getattr(target, key), key


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"taps": [2, 3, 5], "fc_norm": True, "norm_output": True, "draft_vocab_size": 100},
        {"taps": [6], "norm_before_fc": True, "norm_before_residual": True, "num_layers": 2},
    ],
)
def test_eagle3(mapped, tiny_target, options):
    spec, config = mapped("eagle3", steps=3, **options)
    assert spec == {"method": "eagle3", "num_speculative_tokens": 3}
    assert config.architectures == ["Eagle3LlamaForCausalLM"]
    taps = options.get("taps", [2, 3])
    assert config.eagle_aux_hidden_state_layer_ids == taps
    assert getattr(config, "num_aux_hidden_states", 3) == len(taps)  # the Llama class does not count them
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert getattr(config, flag) is options.get(flag, False), flag
    assert config.draft_vocab_size == options.get("draft_vocab_size", tiny_target.config.vocab_size)
    assert config.num_hidden_layers == options.get("num_layers", 1)
    follows_the_target(config, tiny_target.config)


def test_eagle3_of_a_shape_of_its_own(mapped):
    """vLLM's layers take head counts and sizes, and each its window, from these keys (`llama_eagle3`, `qwen3_eagle3`)."""
    shape = {"heads": 8, "kv_heads": 4, "head_dim": 8, "mlp_width": 40}
    kinds = [SLIDING, FULL]
    _, config = mapped("eagle3", steps=3, num_layers=2, layer_types=kinds, sliding_window=5, **shape)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 8)
    assert config.intermediate_size == 40 and config.hidden_act == "silu"
    assert config.layer_types == kinds and config.sliding_window == 5


@pytest.mark.parametrize(
    "options,drafts,from_anchor,causal",
    [
        ({}, 3, False, False),
        ({"slots": "anchor_predicts", "draft_vocab_size": 100}, 4, True, False),
        # One flag for all layers. Full layers are trained to see their whole block, so it may only say causal without any.
        ({"sliding_window_non_causal": False}, 3, False, False),
        ({"layer_types": [SLIDING, FULL], "sliding_window": 5}, 3, False, False),
        ({"layer_types": [SLIDING] * 2, "sliding_window": 5, "sliding_window_non_causal": False}, 3, False, True),
    ],
)
def test_dflash(mapped, tiny_target, options, drafts, from_anchor, causal):
    spec, config = mapped("dflash", **BLOCK, **options)
    assert spec == {"method": "dflash", "num_speculative_tokens": drafts}
    assert config.architectures == ["DFlashDraftModel"]
    assert config.eagle_aux_hidden_state_layer_ids == [2, 3, 5]
    assert config.dflash_config == {
        "mask_token_id": 7,
        "target_layer_ids": [1, 2, 4],  # the same layers: theirs count from 0
        "sample_from_anchor": from_anchor,
        "causal": causal,
    }
    assert config.draft_vocab_size == options.get("draft_vocab_size", tiny_target.config.vocab_size)
    assert config.layer_types == options.get("layer_types", [FULL] * 2)
    assert config.sliding_window == options.get("sliding_window")
    follows_the_target(config, tiny_target.config)


@pytest.mark.parametrize(
    "options", [{}, {"layer_types": [SLIDING, FULL], "sliding_window": 5, "draft_vocab_size": 100}]
)
def test_dspark(mapped, tiny_target, options):
    spec, config = mapped("dspark", **BLOCK, markov_rank=8, **options)
    assert spec == {"method": "dspark", "num_speculative_tokens": 4}
    assert config.architectures == ["Qwen3DSparkModel"]
    assert config.sample_from_anchor is True and config.dspark_bonus_anchor is False
    assert config.eagle_aux_hidden_state_layer_ids == [2, 3, 5] and config.target_layer_ids == [1, 2, 4]
    assert (config.block_size, config.mask_token_id) == (4, 7)
    assert (config.markov_rank, config.markov_head_type) == (8, "vanilla")
    assert config.enable_confidence_head is True and config.confidence_head_with_markov is True
    assert config.draft_vocab_size == options.get("draft_vocab_size", tiny_target.config.vocab_size)
    assert config.layer_types == options.get("layer_types", [FULL] * 2)  # causal in sliding layers, and only there
    follows_the_target(config, tiny_target.config)


def test_mtp_is_served_from_the_targets_own_checkpoint(mapped):
    """vLLM maps no MTP drafter in this format: it wants the head stitched into the target (`trainer/export/stitch.py`)."""
    with pytest.raises(ValueError, match="Expected one of"):
        mapped("mtp")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("dflash", {"layer_types": [SLIDING, FULL], "sliding_window_non_causal": False}, "trained both ways"),
        ("dspark", {"layer_types": [SLIDING] * 2, "sliding_window_non_causal": True}, "trained both ways"),
        ("dspark", {"markov_head": "gated", "markov_rank": 8}, "a gated one"),
        ("dspark", {"markov_head": "vanilla", "markov_rank": 8}, ""),
        ("dflash", {}, ""),
    ],
)
def test_what_vllm_would_serve_otherwise_than_trained_is_said(mapped, caplog, name, options, said):
    with caplog.at_level("WARNING"):
        mapped(name, **BLOCK, **options)
    assert said in caplog.text and bool(said) == bool(caplog.records)
