"""The planner's arithmetic is what torch counts on real models: the proof of every rate that it states."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from data_pipelines.engines.anatomy import anatomy
from data_pipelines.features import Features
from data_pipelines.packing import Document, Pack
from launch.planner.flops import target_flops, training_flops
from launch.planner.shapes import count_target
from launch.planner.volume import Volume
from launch.planner.work import expected_work, measured_work
from tests.trainer.families import FAMILIES, NATIVE
from trainer.batch import Batch
from trainer.drafters import DRAFTERS, build_drafter
from trainer.target import FrozenTarget

LLAMA = {
    "vocab_size": 2000, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
BLOCKS = {"num_layers": 2, "block_size": 5, "anchors": 100, "mask_token": 3}
CASES = {
    "eagle3": ("eagle3", {"steps": 4}),
    "eagle3 with everything": (
        "eagle3",
        {"steps": 3, "num_layers": 2, "fc_norm": True, "norm_output": True, "train_head": True},
    ),
    "mtp": ("mtp", {"steps": 3}),
    "mtp chained": ("mtp", {"steps": 3, "form": "chained"}),
    "dflash": ("dflash", BLOCKS),
    "dflash by D-PACE, with a window": (
        "dflash",
        {**BLOCKS, "weighting": "dpace", "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 30},
    ),
    "dspark": ("dspark", {**BLOCKS, "markov_rank": 16}),
    "dspark rnn": ("dspark", {**BLOCKS, "markov_rank": 16, "markov_head": "rnn"}),
}


def pack_of(lengths, vocabulary, unsupervised=1 / 3):
    rng = np.random.default_rng(0)
    return Pack(
        tuple(
            Document(rng.integers(0, vocabulary, n).astype(np.int32), np.arange(n) >= n * unsupervised) for n in lengths
        )
    )


def trained(config, name, options, lengths, kept, *, recompute=False):
    """(what torch counts of one forward and backward, what the planner does, the work)."""
    torch.manual_seed(0)
    config._experts_implementation = "eager"  # torch counts no grouped products
    frozen = FrozenTarget(AutoModelForCausalLM.from_config(config).float().requires_grad_(False))
    drafter = build_drafter(DRAFTERS[name].Config(**options), config, kept)
    drafter.start_head(frozen)
    drafter.recompute = recompute
    pack = pack_of(lengths, config.vocab_size)
    states = Features(
        torch.randn(len(pack), len(getattr(drafter, "taps", ())), config.hidden_size),
        torch.randn(len(pack), config.hidden_size),
    )
    batch = Batch.of(pack, states, dtype=torch.float32, device="cpu", address=(0,))
    with FlopCounterMode(display=False) as counted:
        targets = drafter.targets(batch, frozen)
        drafter(batch, targets, frozen, torch.ones(drafter.depth))[0].backward()
    work = measured_work(drafter, batch)
    planned = training_flops(drafter, work, count_target("", config, None, ""), recompute=recompute)
    return counted.get_total_flops(), planned.total, work, drafter


@pytest.mark.parametrize("case", CASES)
def test_training_of_every_drafter(case):
    name, options = CASES[case]
    real, planned, _, _ = trained(LlamaConfig(**LLAMA), name, options, [200, 90, 300, 40], torch.arange(0, 2000, 2))
    assert planned == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_training_that_makes_its_activations_again(name):
    _, options = CASES[name]
    real, planned, _, _ = trained(
        LlamaConfig(**LLAMA), name, options, [200, 90, 300, 40], torch.arange(0, 2000, 2), recompute=True
    )
    assert planned == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v3"])
def test_heads_in_the_target_s_own_family(family):
    """Mixtures of experts, latent attention, soft-caps and sinks."""
    config = {**FAMILIES, **NATIVE}[family]()
    real, planned, _, _ = trained(config, "mtp", {"steps": 3}, [20, 30, 14], None)
    assert planned == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gemma3", "phi3", "deepseek_v3"])
def test_the_target_s_forward(family):
    config = {**FAMILIES, **NATIVE}[family]()
    config._experts_implementation = "eager"
    config.sliding_window = 1000  # plain attention, which torch counts, computes what a window hides
    decoder = anatomy(AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()).decoder
    tokens = 48
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        decoder(input_ids=torch.arange(tokens)[None], use_cache=False)
    planned = target_flops(count_target("", config, None, ""), tokens, tokens)
    assert planned.total == pytest.approx(counted.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("case", ["eagle3", "mtp", "dflash", "dspark"])
def test_what_is_expected_of_data_is_what_packs_of_them_hold(case):
    """A plan is made from lengths and shares alone."""
    name, options = CASES[case]
    lengths = [120] * 10
    real, _, work, drafter = trained(LlamaConfig(**LLAMA), name, options, lengths, torch.arange(0, 2000, 2))
    expected = expected_work(drafter, Volume(10, 120, 2 / 3, spread=0.0), 1200 / 0.97)
    assert expected.tokens == pytest.approx(work.tokens)
    assert sum(expected.rows) == pytest.approx(sum(work.rows), rel=0.05)
    assert expected.teacher_rows == pytest.approx(work.teacher_rows, rel=0.05)
    assert sum(expected.pairs) == pytest.approx(sum(work.pairs), rel=0.25)
    planned = training_flops(drafter, expected, count_target("", LlamaConfig(**LLAMA), None, ""))
    assert planned.total == pytest.approx(real, rel=0.07)
