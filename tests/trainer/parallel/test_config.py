"""What cannot be spread is refused before anything is trained, and what may change when a run is resumed."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from data_pipelines.engines import resolve_dtype
from data_pipelines.errors import UserError
from trainer.config import load_config
from trainer.parallel import ParallelConfig, World
from trainer.setup import prepare_run

from .runs import spread

ALONE = World(0, 1, torch.device("cpu"))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["parallel=fsdp"], "did you mean fsdp2?"),
        (["parallel.name=deepsped"], "did you mean deepspeed?"),
        (["parallel.compute_dtype=bf16"], "did you mean bfloat16?"),
        (["parallel=hsdp", "parallel.replicas=3"], "2 ranks cannot be shared out evenly over 3 replicas"),
        (["parallel=ddp", "parallel.replicas=2"], "belongs to parallel=hsdp, not to ddp"),
        (["parallel.replicas=-1"], "parallel.replicas=-1"),
        (["parallel=deepspeed", "parallel.zero_stage=0"], "parallel=ddp is what stage 0 would be"),
        (["parallel=deepspeed", "parallel.zero_stage=4"], "is not one of 1, 2, 3"),
        (["parallel=ddp", "parallel.zero_stage=2"], "belongs to parallel=deepspeed, not to ddp"),
        (["parallel.context=0"], "parallel.context=0"),
        (["parallel.context=3"], "2 ranks cannot share packs by 3"),
        (["optim.max_grad_norm=0"], "clips nothing"),
    ],
)
def test_what_is_refused(overrides, said):
    with pytest.raises(UserError) as refusal:
        load_config("ci_eagle3", overrides)
    assert said in str(refusal.value)


def test_hsdp_has_a_replica_per_machine_unless_told_otherwise():
    config = ParallelConfig("hsdp")
    config.check_size(16, machines=2)
    with pytest.raises(UserError, match="16 ranks cannot be shared out evenly over 3 replicas"):
        config.check_size(16, machines=3)


def test_zero_3_is_refused_where_layers_run_several_times_a_step():
    with pytest.raises(UserError, match="cannot train eagle3, whose layers run several times a step") as refusal:
        spread(ALONE, "eagle3", ParallelConfig("deepspeed", zero_stage=3, compute_dtype="float32"))
    assert "parallel=fsdp2" in refusal.value.fix


def test_without_deepspeed_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(UserError, match="DeepSpeed, which is not installed") as refusal:
        spread(ALONE, "eagle3", ParallelConfig("deepspeed", compute_dtype="float32"))
    assert "draftsmith[deepspeed]" in refusal.value.fix


def test_mode_and_size_are_free_when_a_run_is_resumed_and_the_precision_is_not(tmp_path):
    setup = prepare_run(load_config("ci_eagle3", [f"run_dir={tmp_path}", "data.max_rows=24"]))

    def identity(**options):
        return replace(setup, config=replace(setup.config, parallel=ParallelConfig(**options))).identity

    assert identity(name="deepspeed", zero_stage=2, context=2, recompute=True, compile=True, cpu_offload=True) == (
        setup.identity
    )
    assert identity(compute_dtype="bfloat16") != identity(compute_dtype="float32")
    here = str(resolve_dtype("auto")).removeprefix("torch.")  # what `auto` means may differ where it is resumed
    assert identity(compute_dtype="auto") == identity(compute_dtype=here)
    moved = replace(setup, config=replace(setup.config, target=replace(setup.config.target, kind="hf", path="/moved")))
    assert moved.identity == setup.identity, "the target's fingerprint says which it is"
    other = replace(setup, spec=replace(setup.spec, dtype="float16"))
    assert other.identity != setup.identity
