"""The planner's bytes against what the allocator hands out in a real forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from data_pipelines.features import Features
from launch.planner.memory import rank_memory
from launch.planner.shapes import count_target, draft_shape
from launch.planner.work import measured_work
from trainer.batch import Batch
from trainer.config import load_config
from trainer.drafters import DRAFTERS, build_drafter
from trainer.drafters.cost import kept_bytes
from trainer.drafters.dflash import DFlash
from trainer.target import FrozenTarget

from .test_flops import pack_of

WIDTH = 128
LLAMA = LlamaConfig(
    vocab_size=4000,
    hidden_size=WIDTH,
    intermediate_size=350,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
)
BLOCKS = {"num_layers": 3, "block_size": 8, "anchors": 128, "mask_token": 3}
CASES = [
    ("eagle3", {"steps": 5}, False),
    ("eagle3", {"steps": 5}, True),
    ("mtp", {"steps": 4}, False),
    ("dflash", BLOCKS, False),
    ("dspark", {**BLOCKS, "markov_rank": 64}, True),
]


def allocated(run) -> float:
    """The most bytes that torch's allocator had handed out at once during `run`, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = profiled.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return float(np.cumsum([size for _, size in changes]).max())


@pytest.mark.parametrize(("name", "options", "recompute"), CASES)
def test_a_training_step(name, options, recompute):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LLAMA).float().requires_grad_(False)
    frozen = FrozenTarget(model)
    drafter = build_drafter(DRAFTERS[name].Config(**options), LLAMA, torch.arange(0, 4000, 2))
    drafter.recompute = recompute
    pack = pack_of([300, 200, 400, 124], LLAMA.vocab_size)
    taps = torch.randn(len(pack), len(getattr(drafter, "taps", ())), WIDTH)
    states = Features(taps, torch.randn(len(pack), WIDTH))
    batch = Batch.of(pack, states, dtype=torch.float32, device="cpu", address=(0,))

    def layers() -> object:
        """The forward without the loss."""
        rows = [counts.nonzero().squeeze(1) for counts in drafter.rounds(batch)]
        if isinstance(drafter, DFlash):
            return drafter.train_blocks(batch, frozen, rows[0])
        return drafter.roll_out(batch, frozen, rows)

    def step() -> None:
        targets = drafter.targets(batch, frozen)
        drafter(batch, targets, frozen, torch.ones(drafter.depth))[0].backward()

    kept = kept_bytes(drafter, layers, (batch.taps, batch.final, *model.parameters()))
    peak = allocated(step)
    config = load_config("ci_eagle3", ["global_batch=1", "cluster.ranks=1", f"parallel.recompute={recompute}"])
    target = count_target("", LLAMA, None, "")
    sketch = draft_shape(DRAFTERS[name].Config(**options, draft_vocab_size=2000), target)
    work = measured_work(drafter, batch)
    parts = rank_memory(
        config,
        sketch,
        target,
        work,
        sketch.kept_per_row(target.hidden, "float32"),
        ranks=1,
        machines=1,
        dtype="float32",
    )
    if not recompute:
        assert parts["activations"] == pytest.approx(kept, rel=0.1)
    before = ("frozen embedding, norm and head", "drafter's weights", "drafter's moments", "packs of one step")
    planned = sum(size for part, size in parts.items() if part not in (*before, "drafter's gradients"))
    assert 0.85 < planned / peak < 1.4  # rather too much than too little
