"""Checkpoints on a disk that lies: real folders of torch's distributed checkpoint, damaged in every way that we know."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from data_pipelines.errors import UserError
from trainer.checkpoint import (
    CheckpointConfig,
    Checkpointer,
    agree_on_checkpoint,
    choose_checkpoint,
    find_checkpoint,
    forget_later_checkpoints,
    load_checkpoint,
    newest_step,
    saved_checkpoints,
    whole_checkpoints,
)
from trainer.optim import OptimConfig
from trainer.parallel import ParallelConfig, Strategy, World, parallelize, process_group
from trainer.seal import RUN_FILE, Broken, verify

IDENTITY = {"optim.lr": 0.1, "drafter.taps": [1, 2], "seed": 0}
KINDS = [".metadata", "__0_0.distcp", RUN_FILE]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with process_group(60) as made:
        yield made


class Layer(torch.nn.Linear):
    def shard_units(self) -> list[torch.nn.Module]:
        return []


def spread(model: torch.nn.Module) -> Strategy:
    return parallelize(model, ParallelConfig(), OptimConfig(), World(0, 1, torch.device("cpu")))


def made_of(step: int) -> Strategy:
    """Weights of `step` all over, after as many optimizer steps."""
    strategy = spread(Layer(64, 64))
    torch.nn.init.constant_(strategy.drafter.weight, float(step))
    for moments in strategy.state()["optimizer"].values():
        moments["step"].fill_(step)
    return strategy


def save(folder: Path, steps: list[int], **options) -> Checkpointer:
    checkpointer = Checkpointer(folder, CheckpointConfig(**options), IDENTITY)
    for step in steps:
        checkpointer.save(step, made_of(step))
    checkpointer.close()
    return checkpointer


@pytest.fixture
def folder(world, tmp_path) -> Path:
    """Checkpoints of steps 4 and 8."""
    save(tmp_path / "checkpoints", [4, 8])
    return tmp_path / "checkpoints"


def flip_a_bit(path: Path, where: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(where * (len(content) - 1))] ^= 4
    path.write_bytes(content)


DAMAGES = {
    "a flipped bit": flip_a_bit,
    "a flipped first bit": lambda path: flip_a_bit(path, 0.0),
    "a flipped last bit": lambda path: flip_a_bit(path, 1.0),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_noticed_and_the_one_before_is_taken(folder, world, caplog, kind, damage):
    assert choose_checkpoint(folder, "auto", IDENTITY).name == "step_00000008"
    DAMAGES[damage](folder / "step_00000008" / kind)
    if damage == "longer" and kind == RUN_FILE:
        assert "\0" in (folder / "step_00000008" / kind).read_text()
    with caplog.at_level(logging.WARNING):
        chosen = choose_checkpoint(folder, "auto", IDENTITY)
    assert chosen.name == "step_00000004"
    assert f"step_00000008: {kind}" in caplog.text and "going on from step_00000004" in caplog.text
    strategy = made_of(0)
    assert load_checkpoint(chosen, strategy) == 4
    assert strategy.full_weights()["weight"].unique().tolist() == [4.0]
    with pytest.raises(UserError, match=f"not a whole checkpoint: {kind}"):
        choose_checkpoint(folder, str(folder / "step_00000008"), IDENTITY)
    with pytest.raises(UserError, match=f"step_00000008 is broken: {kind}") as error:
        find_checkpoint(folder.parent)
    assert "step 4" in error.value.fix
    assert find_checkpoint(folder.parent, 4) == chosen
    assert newest_step(folder.parent) == 4


def test_no_bit_of_the_seal_can_turn_unnoticed(folder):
    """Every bit of run.json; what is still read as the same seal is no harm."""
    path = folder / "step_00000008" / RUN_FILE
    good, before = path.read_bytes(), verify(path.parent)
    for bit in range(8 * len(good)):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            assert verify(path.parent) == before
        except Broken:
            continue


def test_a_seal_of_another_checkpoint_does_not_fit(folder):
    (folder / "step_00000008" / RUN_FILE).write_bytes((folder / "step_00000004" / RUN_FILE).read_bytes())
    assert [path.name for path in whole_checkpoints(folder)] == ["step_00000004"]


def test_when_every_one_is_broken_nothing_is_trained_anew_in_silence(folder):
    for step in (4, 8):
        flip_a_bit(folder / f"step_{step:08d}" / "__0_0.distcp")
    with pytest.raises(UserError, match="every checkpoint of this run is broken") as error:
        choose_checkpoint(folder, "auto", IDENTITY)
    assert "step_00000008: __0_0.distcp is corrupt" in str(error.value) and "resume=never" in error.value.fix
    assert choose_checkpoint(folder, "never", IDENTITY) is None


def test_moments_of_another_step_are_refused(world, tmp_path):
    """What a framework that forgets its moments leaves behind: weights of step 8 with an optimizer that begins anew."""
    strategy = made_of(8)
    for moments in strategy.state()["optimizer"].values():
        moments["step"].zero_()
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(), IDENTITY)
    checkpointer.save(8, strategy, wait=True)
    with pytest.raises(UserError, match="the checkpoint is of 8 steps and its moments of 0"):
        load_checkpoint(tmp_path / "step_00000008", made_of(0))


def test_without_any_it_starts_anew(world, tmp_path):
    assert choose_checkpoint(tmp_path, "auto", IDENTITY) is None
    with pytest.raises(UserError, match=r"not a whole checkpoint: run\.json is missing"):
        choose_checkpoint(tmp_path, str(tmp_path / "step_00000004"), IDENTITY)


def test_what_rank_0_chose_or_refused_holds_for_all(folder, world):
    agreed = agree_on_checkpoint(folder, "auto", IDENTITY, world)
    assert agreed == folder / "step_00000008"
    named = str(folder / "step_00000004")
    assert agree_on_checkpoint(folder, named, IDENTITY, world) == Path(named)
    assert agree_on_checkpoint(folder, "never", IDENTITY, world) is None
    with pytest.raises(UserError, match=r"seed: 0 there, 1 now"):
        agree_on_checkpoint(folder, "auto", {**IDENTITY, "seed": 1}, world)

    class Elsewhere(World):
        """Rank 1, on a machine where the folder holds something else."""

        def from_first(self, numbers):
            return [1, 8, 12345]

    with pytest.raises(UserError, match="do not see the checkpoint that rank 0 goes on from; rank 1 is one of them"):
        agree_on_checkpoint(folder, "auto", IDENTITY, Elsewhere(1, 1, torch.device("cpu")))


@pytest.mark.parametrize(
    ("options", "kept"),
    [({"keep": 1}, [10]), ({"keep": 3}, [6, 8, 10]), ({"keep": 1, "keep_every": 4}, [4, 8, 10])],
)
def test_the_policy_keeps_the_newest_and_the_milestones(world, tmp_path, options, kept):
    save(tmp_path, [2, 4, 6, 8, 10], **options)
    assert list(saved_checkpoints(tmp_path)) == kept
    assert len(whole_checkpoints(tmp_path)) == len(kept)


def test_a_broken_newest_one_does_not_push_out_the_only_good_one(world, tmp_path):
    """Resumed from 4 because 8 was broken, then stopped at 6: of 6 and 8, with keep=1, it is 6 that has to stay."""
    save(tmp_path, [4, 8], keep=2)
    flip_a_bit(tmp_path / "step_00000008" / "__0_0.distcp")
    save(tmp_path, [6], keep=1)
    assert list(saved_checkpoints(tmp_path)) == [6]
    assert choose_checkpoint(tmp_path, "auto", IDENTITY).name == "step_00000006"


def test_what_a_killed_save_left_is_swept(world, tmp_path):
    (tmp_path / ".step_00000004.tmp").mkdir()
    save(tmp_path, [8])
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000008"]


def test_a_refused_policy():
    with pytest.raises(UserError, match=r"checkpoint\.keep=0"):
        CheckpointConfig(keep=0)
    with pytest.raises(UserError, match=r"checkpoint\.keep_every=-1"):
        CheckpointConfig(keep_every=-1)
    with pytest.raises(UserError, match=r"checkpoint\.every=-5"):
        CheckpointConfig(every=-5)


def test_a_named_one_is_of_this_run(folder, tmp_path):
    assert choose_checkpoint(folder, str(folder / "step_00000004"), IDENTITY) == folder / "step_00000004"
    save(tmp_path / "other" / "checkpoints", [4])
    with pytest.raises(UserError, match="is not a checkpoint of this run") as refusal:
        choose_checkpoint(folder, str(tmp_path / "other" / "checkpoints" / "step_00000004"), IDENTITY)
    assert "step_00000004, step_00000008" in refusal.value.fix


def test_going_back_forgets_what_was_later(folder):
    forget_later_checkpoints(folder, 4)
    assert list(saved_checkpoints(folder)) == [4]


SAVES = """
import sys
from pathlib import Path
from tests.trainer.test_checkpoint import IDENTITY, Layer, spread
from trainer.checkpoint import CheckpointConfig, Checkpointer
from trainer.parallel import process_group

with process_group(60):
    checkpointer = Checkpointer(Path(sys.argv[1]), CheckpointConfig(keep=2), IDENTITY)
    strategy = spread(Layer(4096, 4096))
    for step in range(1, 1000):
        checkpointer.save(step, strategy)
"""


def test_killed_in_the_middle_of_a_save_the_earlier_one_is_whole(world, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", SAVES, str(tmp_path)], cwd=Path(__file__).parents[2])
    deadline = time.monotonic() + 120
    while not (saved_checkpoints(tmp_path) and any(tmp_path.glob(".step_*.tmp/*.distcp"))):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (half,) = tmp_path.glob(".step_*.tmp")
    assert not (half / RUN_FILE).exists(), "the kill came too late to show anything"
    newest = max(saved_checkpoints(tmp_path))
    assert choose_checkpoint(tmp_path, "auto", IDENTITY).name == f"step_{newest:08d}"
    assert json.loads((tmp_path / f"step_{newest:08d}" / RUN_FILE).read_text())["step"] == newest
