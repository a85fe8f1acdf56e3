"""Every mode trains the same drafter: the real loop on one, two and four real ranks, accumulating and clipping."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.batch import Batch
from trainer.checkpoint import CheckpointConfig, Checkpointer, load_checkpoint
from trainer.parallel import ParallelConfig, limit_waits

from .ranks import on_ranks
from .runs import PACKS, Packs, Run, frozen_target, held, loss_weights, new_drafter, optim, spread, train, whole

STEPS = 3
MODES = {
    "fsdp2": {"name": "fsdp2"},
    "hsdp": {"name": "hsdp", "replicas": 2},
    "ddp": {"name": "ddp"},
    "zero1": {"name": "deepspeed", "zero_stage": 1},
    "zero2": {"name": "deepspeed", "zero_stage": 2},
    "zero3": {"name": "deepspeed", "zero_stage": 3},
    "offload": {"name": "fsdp2", "cpu_offload": True},
    "zero2 offload": {"name": "deepspeed", "zero_stage": 2, "cpu_offload": True},
    "recompute": {"name": "fsdp2", "recompute": True},
}
SIZES = {
    1: ["fsdp2", "ddp", "zero1"],
    2: ["fsdp2", "hsdp", "ddp", "zero1", "zero2", "offload", "zero2 offload", "recompute"],
    4: ["fsdp2", "hsdp"],
}
needs_deepspeed = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="DeepSpeed is not installed")


def config(mode: str, **options) -> ParallelConfig:
    return ParallelConfig(**{"compute_dtype": "float32", **MODES[mode], **options})


def there(modes: list[str]) -> list[str]:
    found = importlib.util.find_spec("deepspeed")
    return [mode for mode in modes if found or MODES[mode]["name"] != "deepspeed"]


def train_all(world, modes: list[str], folder: Path) -> dict[str, Run]:
    return {mode: train(world, config(mode), folder / f"{mode}-{world.size}", 0, STEPS) for mode in modes}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("modes")


@pytest.fixture(scope="module")
def runs(folder) -> dict[tuple[str, int], Run]:
    """Of every mode and size: what rank 0 has after three steps, whose checkpoint is in `folder`/<mode>-<size>."""
    done = {}
    for size, modes in SIZES.items():
        of_size = on_ranks(size, train_all, there(modes), folder)[0]
        done |= {(mode, size): run for mode, run in of_size.items()}
    return done


def test_every_mode_and_size_gives_the_same_losses_and_weights(runs):
    """Sums in another order: equal to the rounding of float32, which AdamW's division by a small root can raise."""
    first = runs["fsdp2", 1]
    assert len({row["loss"] for row in first.rows}) == STEPS and all(row["packs"] == PACKS for row in first.rows)
    for (mode, size), run in runs.items():
        for row, expected in zip(run.rows, first.rows, strict=True):
            assert row["loss"] == pytest.approx(expected["loss"], rel=1e-6), (mode, size)
            assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5), (mode, size)
            assert row["grad_norm"] > 10 * optim().max_grad_norm, "nothing was clipped"
        assert run.weights.keys() == first.weights.keys(), (mode, size)
        for name, weight in run.weights.items():
            np.testing.assert_allclose(weight, first.weights[name], rtol=0, atol=3e-6, err_msg=f"{mode} {size} {name}")


@pytest.mark.parametrize(
    ("mode", "size", "same"),
    [("ddp", 1, "fsdp2"), ("hsdp", 2, "ddp"), ("offload", 2, "fsdp2"), ("recompute", 2, "fsdp2")],
)
def test_where_a_mode_allows_it_they_are_the_same_bits(runs, mode, size, same):
    """Where sums are in the same order, that of the norm included."""
    for name, weight in runs[mode, size].weights.items():
        assert np.array_equal(weight, runs[same, size].weights[name]), name


def load_all(world, mode: str, origins: list[tuple[str, int]], folder: Path) -> list[tuple[dict, dict]]:
    strategy, _ = spread(world, "eagle3", config(mode))
    found = []
    for origin, size in origins:
        assert load_checkpoint(folder / f"{origin}-{size}" / f"step_{STEPS:08d}", strategy) == STEPS
        found.append(whole(strategy))
    return found


@pytest.mark.parametrize(("mode", "size"), [("fsdp2", 1), ("hsdp", 4), ("ddp", 2), ("zero2", 2)])
def test_a_checkpoint_of_any_mode_and_size_is_loaded_bit_for_bit(runs, folder, mode, size):
    """Weights and moments: what is in memory after loading is what was when it was saved."""
    if not there([mode]):
        pytest.skip("DeepSpeed is not installed")
    wanted = {("fsdp2", 2), ("hsdp", 4), ("ddp", 1), ("zero1", 1), ("zero2", 2)}
    origins = [origin for origin in runs if origin in wanted]
    for origin, (weights, moments) in zip(origins, on_ranks(size, load_all, mode, origins, folder)[0], strict=True):
        run = runs[origin]
        assert weights.keys() == run.weights.keys() and moments.keys() == run.moments.keys()
        for name, weight in weights.items():
            assert np.array_equal(weight, run.weights[name]), (origin, name)
        for name, moment in moments.items():
            assert np.array_equal(moment, run.moments[name]) and moment.any(), (origin, name)


def test_a_run_that_changes_mode_and_size_at_every_step_is_the_same_run(runs, folder):
    """Without its moments, or with the learning rate of a fresh start, the last step would be another one by far."""
    first, path = runs["fsdp2", 1], folder / "changing"
    rows = []
    for step, (mode, size) in enumerate([("ddp", 2), ("zero2", 1), ("hsdp", 4)]):
        used = mode if there([mode]) else "fsdp2"
        last = on_ranks(size, train, config(used), path, step, step + 1)[0]
        rows += last.rows
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in first.rows], rel=1e-6)
    for name, weight in last.weights.items():
        np.testing.assert_allclose(weight, first.weights[name], rtol=0, atol=3e-6, err_msg=name)


def dflash(world, modes: list[str], folder: Path) -> list[Run]:
    return [train(world, config(mode), folder / f"dflash-{mode}", 0, STEPS, "dflash") for mode in modes]


@needs_deepspeed
def test_zero_3_shards_the_weights_of_a_drafter_whose_layers_run_once(folder):
    fsdp2, zero3 = on_ranks(2, dflash, ["fsdp2", "zero3"], folder)[0]
    assert [r["loss"] for r in zero3.rows] == pytest.approx([r["loss"] for r in fsdp2.rows], rel=1e-6)
    for name, weight in zero3.weights.items():
        np.testing.assert_allclose(weight, fsdp2.weights[name], rtol=0, atol=1e-5, err_msg=name)


class Reductions(TorchDispatchMode):
    """How many collectives that reduce were called, and in which dtypes."""

    def __init__(self):
        super().__init__()
        self.number, self.dtypes = 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        if function.namespace == "c10d" and "reduce" in function.__name__:
            self.number += 1
            self.dtypes |= {leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        return function(*args, **(kwargs or {}))


def looked_at(world, modes: list[str]) -> dict[str, dict]:
    return {mode: look(world, mode) for mode in modes}


def look(world, mode: str) -> dict:
    """One step's forward and backward in bfloat16: what is reduced when, what is computed in what, what is held."""
    strategy, frozen = spread(world, "eagle3", config(mode, compute_dtype="bfloat16"))
    seen: set[torch.dtype] = set()
    strategy.drafter.fc.register_forward_hook(lambda module, args, out: seen.update({args[0].dtype, out.dtype}))
    batches, targets, weights = loss_weights(world, strategy, frozen)
    before = {n: t.clone() for n, t in strategy.full_weights().items()}
    began = dict(new_drafter("eagle3", frozen).named_parameters())
    assert all(torch.equal(weight, began[name]) for name, weight in before.items()), "masters of rounded weights"
    reduced = []
    for batch, target in zip(batches, targets, strict=True):
        with Reductions() as counted:
            strategy.backward(strategy(batch, target, frozen, weights)[0], last=batch is batches[-1])
        reduced.append(counted.number)
        assert counted.dtypes <= {torch.float32}, "reduced in another precision"
    strategy.step(1e-5)
    state = strategy.state()
    dtypes = {t.dtype for t in state["model"].values() if t.is_floating_point()}
    dtypes |= {
        state["optimizer"][n][k].dtype for n in state["optimizer"] for k in ("exp_avg",) if k in state["optimizer"][n]
    }
    moved = [
        (after - before[name]).abs().max().item() for name, after in strategy.full_weights().items() if name in before
    ]
    return {"seen": seen, "reduced": reduced, "dtypes": dtypes, "moved": moved, "bytes": held(strategy)}


def test_one_reduction_a_step_bf16_compute_fp32_masters_and_shards(runs):
    modes = there(["fsdp2", "ddp", "zero1", "zero2"])
    every = on_ranks(2, looked_at, modes)
    everything = 12 * sum(w.size for w in runs["fsdp2", 1].weights.values())
    for mode in modes:
        for seen in (ranks[mode] for ranks in every):
            assert seen["seen"] == {torch.bfloat16}
            assert seen["dtypes"] == {torch.float32}
            # Steps of 1e-5 are lost in bfloat16, beside weights of more than 0.01.
            assert all(0 < moved < 1e-4 for moved in seen["moved"] or [1e-5])
            early = sum(seen["reduced"][:-1])
            assert seen["reduced"][-1] > 0 and (early > 0) == (mode == "zero2"), seen["reduced"]
            expected = everything if mode == "ddp" else everything / 2
            assert seen["bytes"] == pytest.approx(expected, rel=0.05), mode


def gradients(world) -> dict[str, np.ndarray]:
    """The summed gradient of one step, before clipping."""
    strategy, frozen = spread(world, "eagle3", config("hsdp"))
    batches, targets, weights = loss_weights(world, strategy, frozen)
    for batch, target in zip(batches, targets, strict=True):
        strategy.backward(strategy(batch, target, frozen, weights)[0], last=batch is batches[-1])
    return {n: p.grad.full_tensor().numpy() for n, p in strategy.drafter.named_parameters() if p.grad is not None}


def test_the_gradient_is_that_of_one_process_in_float64():
    found = on_ranks(4, gradients)[0]
    frozen = frozen_target(torch.float64)
    drafter = new_drafter("eagle3", frozen).double()
    packs = Packs(0, 1, 0)
    batches = []
    for _ in range(PACKS):
        index, pack, features = packs.next(None)
        batches.append(Batch.of(pack, features, dtype=torch.float64, device="cpu", address=(0, index)))
    targets = [drafter.targets(batch, frozen) for batch in batches]
    divisors = drafter.divisors(sum(target.denominators for target in targets))
    weights = torch.tensor(drafter.step_weights, dtype=torch.float64) / divisors
    for batch, target in zip(batches, targets):
        drafter(batch, target, frozen, weights)[0].backward()
    compared = {n: p.grad.numpy() for n, p in drafter.named_parameters() if p.grad is not None}
    assert found.keys() == compared.keys()
    for name, gradient in compared.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=2e-5 * scale, err_msg=name)


def not_finite(world, modes: list[str]) -> dict[str, tuple[float, bool]]:
    said = {}
    for mode in modes:
        strategy, frozen = spread(world, "eagle3", config(mode))
        batches, targets, weights = loss_weights(world, strategy, frozen)
        before = {n: t.clone() for n, t in strategy.full_weights().items()}
        for batch, target in zip(batches, targets, strict=True):
            loss = strategy(batch, target, frozen, weights)[0]
            strategy.backward(loss * (float("inf") if world.rank == 1 else 1.0), last=batch is batches[-1])
        norm = strategy.step(1.0)
        same = all(torch.equal(t, before[n]) for n, t in strategy.full_weights().items())
        said[mode] = (norm, same)
    return said


def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing_on_any():
    for said in on_ranks(2, not_finite, there(["fsdp2", "zero1", "zero2"])):
        for mode, (norm, same) in said.items():
            assert not np.isfinite(norm) and same, mode


def waits(world, config: ParallelConfig, folder: Path) -> list[float]:
    """Seconds after which a collective of each group gives up."""
    strategy, _ = spread(world, "eagle3", config)
    checkpointer = Checkpointer(folder, CheckpointConfig(), {})
    limit_waits(7.0)
    groups = torch.distributed.distributed_c10d._world.pg_map
    seconds = [g._get_backend(world.device).options._timeout.total_seconds() for g in groups]
    del strategy, checkpointer
    return seconds


@pytest.mark.parametrize("mode", ["hsdp", pytest.param("zero1", marks=needs_deepspeed)])
def test_no_group_waits_longer_than_told(mode, tmp_path):
    for seconds in on_ranks(2, waits, config(mode), tmp_path):
        assert len(seconds) > 2 and set(seconds) == {7.0}
