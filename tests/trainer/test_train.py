"""The trainer as users start it: real torchrun, real processes, and a run is a function."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from trainer.checkpoint import whole_checkpoints
from trainer.loop import PREEMPTED

from .running import metrics, result, start, train


def test_a_run_leaves_what_it_should_and_learns(undisturbed):
    done = result(undisturbed)
    rows = metrics(undisturbed)
    assert [r["step"] for r in rows] == list(range(done["steps"])) and done["steps"] >= 8
    assert done["loss"]["last"] < 0.8 * done["loss"]["first"]
    assert sum(r["tokens"] for r in rows) == done["tokens"]
    assert (undisturbed / "config.yaml").exists()
    newest = whole_checkpoints(undisturbed / "checkpoints")
    assert [p.name for p in newest] == [
        f"step_{s:08d}" for s in sorted({*range(4, done["steps"] + 1, 4), done["steps"]})
    ][-2:]


def test_the_same_run_gives_the_same_bits(undisturbed, tmp_path):
    train(tmp_path, plain=True)  # plain python, without torchrun, is one rank too
    assert result(tmp_path)["weights_sha256"] == result(undisturbed)["weights_sha256"]


def test_another_seed_gives_other_weights_and_wandb_works_without_an_account(undisturbed, tmp_path):
    train(tmp_path, "seed=1", "tracker=wandb", "max_steps=4", plain=True)
    assert result(tmp_path)["weights_sha256"] != result(undisturbed)["weights_sha256"]
    assert metrics(tmp_path)[0]["loss"] != metrics(undisturbed)[0]["loss"]
    (recorded,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert recorded.stat().st_size > 0


def test_two_ranks_follow_the_same_loss(undisturbed, two_ranks):
    """Rule 3, one denominator: sums in another order, so equal to rounding, not to the bit."""
    for one, two in zip(metrics(undisturbed), metrics(two_ranks), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert (two["tokens"], two["packs"]) == (one["tokens"], one["packs"])
    first, second = metrics(undisturbed)[0], metrics(two_ranks)[0]
    assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-2)  # global, not of a local shard


@pytest.mark.faults
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_after_a_checkpoint_and_resumed_the_weights_are_the_undisturbed_ones(
    undisturbed, two_ranks, tmp_path, ranks
):
    process = start(tmp_path, ranks=ranks)
    deadline = time.monotonic() + 150
    while not whole_checkpoints(tmp_path / "checkpoints"):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)  # the agent, outright: the ranks must not live on
    process.communicate()
    assert not (tmp_path / "training.json").exists(), "the kill came too late to show anything"
    deadline = time.monotonic() + 20
    while survivors := _processes_of(tmp_path):
        assert time.monotonic() < deadline, survivors
        time.sleep(0.1)
    train(tmp_path, ranks=ranks)
    reference = undisturbed if ranks == 1 else two_ranks
    assert result(tmp_path)["weights_sha256"] == result(reference)["weights_sha256"]
    stable = ("step", "loss", "conditional_rate", "grad_norm", "lr", "tokens")
    assert [[r[k] for k in stable] for r in metrics(tmp_path)] == [[r[k] for k in stable] for r in metrics(reference)]


@pytest.mark.faults
def test_sigterm_checkpoints_and_says_so(undisturbed, tmp_path):
    process = start(tmp_path, "checkpoint.every=0", plain=True)
    while not (tmp_path / "metrics.jsonl").exists() or len(metrics(tmp_path)) < 2:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == PREEMPTED, said
    assert len(whole_checkpoints(tmp_path / "checkpoints")) == 1
    train(tmp_path, "checkpoint.every=0", plain=True)
    assert result(tmp_path)["weights_sha256"] == result(undisturbed)["weights_sha256"]


def test_another_runs_checkpoint_is_refused_naming_what_differs(undisturbed):
    before = (undisturbed / "config.yaml").read_bytes()
    said = train(undisturbed, "optim.lr=9", "seed=3", plain=True, status=2)
    assert (undisturbed / "config.yaml").read_bytes() == before
    assert "optim.lr: 0.002 there, 9.0 now" in said and "seed: 0 there, 3 now" in said and "Traceback" not in said


def test_a_stream_without_a_ledger_says_how_to_get_one(tmp_path):
    said = train(tmp_path, "source=stream", plain=True, status=2)
    assert "needs a ledger" in said and "source=colocated" in said and "Traceback" not in said


@pytest.mark.faults
@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of bounded size needs root")
def test_a_full_disk_while_checkpointing_stops_the_run_and_spoils_nothing(undisturbed, tmp_path):
    """A real file system that is too small for a second checkpoint: the first stays whole, and the run can go on."""
    one = sum(f.stat().st_size for f in whole_checkpoints(undisturbed / "checkpoints")[-1].rglob("*"))
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={int(one * 1.7)}", "tmpfs", folder], check=True)
    try:
        said = train(tmp_path, plain=True, status=2)
        assert "the checkpoint of step 8 could not be written" in said and "No space left" in said
        assert "step_00000004 is whole" in said and "Traceback" not in said
        assert [p.name for p in folder.iterdir()] == ["step_00000004"]
        subprocess.run(["mount", "-o", "remount,size=100%", folder], check=True)
        train(tmp_path, plain=True)
        assert result(tmp_path)["weights_sha256"] == result(undisturbed)["weights_sha256"]
    finally:
        subprocess.run(["umount", folder], check=True)


def _processes_of(run_dir: Path) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(run_dir) in command and "pytest" not in command:
            found.append(command)
    return found
