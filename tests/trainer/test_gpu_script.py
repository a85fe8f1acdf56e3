"""`make gpu`, where there is no GPU: the script itself, on tiny shapes."""

from __future__ import annotations

import gc
import re
import weakref

import pytest
import torch

from launch.placement import assign_gpus
from tests.benchmarks import gpu
from trainer.config import load_config

TINY = ["--device", "cpu", "--size", "tiny", "--skip-demo"]


def test_every_8b_recipe_is_measured_and_the_next_finds_nothing_of_it(capsys, monkeypatch) -> None:
    shards, spread = [], gpu.parallelize

    def remembered(*arguments):
        assert not any(shard() is not None for shard in shards), "what a recipe before has trained is still there"
        strategy = spread(*arguments)
        shards.extend(weakref.ref(parameter) for parameter in strategy.drafter.parameters())
        return strategy

    monkeypatch.setattr(gpu, "parallelize", remembered)
    gc.disable()
    try:
        assert gpu.main([*TINY, "--steps", "1"]) == 0
    finally:
        gc.enable()
    said = capsys.readouterr().out
    for recipe in gpu.TARGETS:
        rate, flops = re.search(rf"\| {recipe} \| [\d.]+ \| ([\d,]+) \| ([\d.]+) \|.* 1 \|", said).groups()
        assert float(rate.replace(",", "")) > 0 and float(flops) > 0


def test_a_recipe_that_does_not_fit_or_takes_too_long_says_so(capsys, monkeypatch) -> None:
    measure, seen = gpu.measure, []

    def crowded(recipe, *arguments):
        seen.append(capsys.readouterr().out)
        if "eagle3" in recipe:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return measure(recipe, *arguments)

    monkeypatch.setattr(gpu, "measure", crowded)
    monkeypatch.setattr(gpu, "TARGETS", {name: gpu.TARGETS[name] for name in ("llama31_8b_eagle3", "qwen3_8b_mtp")})
    assert gpu.main([*TINY, "--steps", "7", "--minutes", "0"]) == 0
    assert "| llama31_8b_eagle3 | out of memory |" in seen[1]  # each row is printed when it is known
    assert re.search(r"\| qwen3_8b_mtp \| .* \| 1 of 7: its time was over \|", capsys.readouterr().out)


@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
def test_the_demo_asks_for_no_more_gpus_than_there_are(gpus) -> None:
    cluster = load_config("demo", gpu.demo_overrides(gpus)).cluster
    ranks, _ = assign_gpus([str(number) for number in range(gpus)], cluster.ranks, cluster.producers)
    assert len(ranks) == min(2, gpus)
