"""What the planner counts equals what is published, and what is really built."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, Gemma4TextConfig

from data_pipelines.engines.targets import TargetConfig
from data_pipelines.errors import UserError
from launch.planner.flops import training_flops
from launch.planner.shapes import SMOLLM2, TABLE, count_target, draft_shape, table_target, target_shape
from launch.planner.volume import Volume
from launch.planner.work import expected_work
from tests.trainer.families import FAMILIES, NATIVE, SHAPE
from trainer.drafters import DRAFTERS, build_drafter
from trainer.drafters.eagle3 import Eagle3Config
from trainer.drafters.mtp import MTPConfig

ROWS = yaml.safe_load(TABLE.read_text())


@pytest.mark.parametrize("name", ROWS)
def test_counts_are_the_published_ones(name):
    shape, published = table_target(name), ROWS[name]["published"]
    active = shape.active - (0 if published.get("counts_embedding", True) else shape.embedding)
    assert shape.parameters == pytest.approx(published["parameters"], rel=0.02)
    assert active == pytest.approx(published["active"], rel=0.02)
    assert ROWS[name]["source"]


@pytest.mark.parametrize("name", [*FAMILIES, "deepseek_v3"])
def test_counts_are_those_of_real_models(name):
    config = {**FAMILIES, **NATIVE}[name]()
    model = AutoModelForCausalLM.from_config(config)
    shape = count_target(name, config, None, "")
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    kept = torch.arange(0, 96, 2)
    for drafter_name, drafter in DRAFTERS.items():
        options = {"mask_token": 1} if hasattr(drafter.Config, "mask_token") else {}
        built = build_drafter(drafter.Config(**options), config, kept)
        sketch = draft_shape(drafter.Config(draft_vocab_size=48, **options), shape)
        counted = {n: tuple(p.shape) for n, p in sketch.named_parameters()}
        assert counted == {n: tuple(p.shape) for n, p in built.named_parameters()}, drafter_name
        assert all(p.is_meta for p in sketch.parameters())


def test_a_target_whose_layers_differ():
    """Gemma 4: heads of its full layers are wider. Drafters follow the first layer, an MTP head the last full one."""
    config = Gemma4TextConfig(
        **{**SHAPE, "layer_types": ["sliding_attention", "full_attention"] * 2}, global_head_dim=16, sliding_window=7,
        hidden_size_per_layer_input=0,
    )  # fmt: skip
    shape = count_target("gemma4", config, None, "")
    assert [(a.key, a.window) for a in shape.attention] == [(8, 7), (16, 0)] * 2
    work = expected_work(eagle3 := draft_shape(Eagle3Config(), shape), Volume(1000, 1000, 0.5), 4096)
    assert eagle3.layers[0].self_attn.k_proj.out_features == 2 * 8
    for drafter in (eagle3, draft_shape(MTPConfig(steps=eagle3.depth), shape)):
        assert training_flops(drafter, work, shape).matmul > 0
    assert drafter.mtp_layers[0].self_attn.k_proj.out_features == 2 * 16


def test_a_folder_with_a_config_is_enough(tmp_path, tiny_target):
    row = ROWS["Qwen/Qwen3-8B"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(row))
    shape = target_shape(TargetConfig(kind="hf", path=str(tmp_path)))
    assert shape.parameters == table_target("Qwen/Qwen3-8B").parameters
    assert target_shape(TargetConfig(kind="tiny")).parameters == sum(
        p.numel() for p in tiny_target.load_model(torch.float32).parameters()
    )


def test_the_demo_target_has_its_name_s_size():
    config = AutoConfig.for_model(**SMOLLM2)
    assert count_target("SmolLM2-135M", config, None, "").parameters == pytest.approx(135e6, rel=0.01)


def test_unknown_targets_are_refused_with_the_way_out():
    with pytest.raises(UserError) as refused:
        target_shape(TargetConfig(kind="hf", path="nobody/Unheard-Of-7B"))
    assert "a folder with its config.json" in refused.value.fix and "Qwen/Qwen3-8B" in refused.value.fix
