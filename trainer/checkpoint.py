"""Checkpoints: torch's distributed checkpoint (how), and when, which and whether it is this run's (here).

A checkpoint is a folder `step_<n>` that appears by a rename after everything in it was written: it is whole or absent.
Beside the tensors it holds `run.json`: the step, and the identity of the run (the part of the config that decides the
weights, and the plan's fingerprint).
"""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from data_pipelines.errors import UserError

RUN_FILE = "run.json"
FULL_DISK_BYTES = 16 * 1024**2


@dataclass
class CheckpointConfig:
    """every: steps between checkpoints (one is always written at the end). keep: how many of the newest stay."""

    every: int = 50
    keep: int = 2
    asynchronous: bool = True

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise UserError(f"checkpoint.keep={self.keep}; at least the newest must stay")


def whole_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(p.parent for p in folder.glob(f"step_*/{RUN_FILE}"))


def newest_step(run_dir: Path) -> int:
    """How many steps the newest whole checkpoint of a run holds; 0 without one."""
    whole = whole_checkpoints(run_dir / "checkpoints")
    return _step(whole[-1]) if whole else 0


def find_checkpoint(run_dir: Path, step: int | None = None) -> Path:
    """The newest whole checkpoint of a run, or the one of `step`. Raises UserError when it is not there."""
    found = {_step(path): path for path in whole_checkpoints(run_dir / "checkpoints")}
    if not found:
        raise UserError(
            "this run has no whole checkpoint", where=str(run_dir), fix="train first: draftsmith run <recipe>"
        )
    if step is not None and step not in found:
        there = ", ".join(map(str, found))
        raise UserError(f"there is no checkpoint of step {step}", where=str(run_dir), fix=f"there are {there}")
    return found[max(found) if step is None else step]


def _step(checkpoint: Path) -> int:
    return json.loads((checkpoint / RUN_FILE).read_text())["step"]


class Checkpointer:
    """Saves in the background over a process group of its own (on the default group, an asynchronous save and FSDP's own
    collectives deadlock). A failed save is raised at the next call of `save`, `check` or `close`."""

    def __init__(self, folder: Path, config: CheckpointConfig, identity: dict[str, Any]):
        self._folder, self._config, self._identity = folder, config, identity
        self._rank = dist.get_rank()
        self._group = dist.new_group(backend="gloo")
        self._pending: tuple[int, Future] | None = None

    def due(self, step: int, total: int) -> bool:
        """After `step` steps are done."""
        return step == total or (self._config.every > 0 and step % self._config.every == 0)

    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, wait: bool = False) -> None:
        self._finish()
        temporary = self._folder / f".step_{step:08d}.tmp"
        if self._rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            self._folder.mkdir(parents=True, exist_ok=True)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        writer = dcp.FileSystemWriter(temporary, sync_files=True)
        try:
            if self._config.asynchronous and not wait:
                future = dcp.async_save(state, storage_writer=writer, process_group=self._group)
                self._pending = (step, future)
            else:
                dcp.save(state, storage_writer=writer, process_group=self._group)
                self._publish(step)
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            raise self._failure(step, error) from error

    def check(self) -> None:
        """Publishes a background save that is done, or raises what went wrong with it."""
        if self._pending and self._pending[1].done():
            self._finish()

    def close(self) -> None:
        self._finish()

    def _finish(self) -> None:
        if self._pending is None:
            return
        step, future = self._pending
        self._pending = None
        try:
            future.result()
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            raise self._failure(step, error) from error
        self._publish(step)

    def _publish(self, step: int) -> None:
        """On rank 0, whose save returns after every rank's data and the metadata are on disk."""
        if self._rank != 0:
            return
        final = self._folder / f"step_{step:08d}"
        temporary = self._folder / f".step_{step:08d}.tmp"
        (temporary / RUN_FILE).write_text(json.dumps({"step": step, "identity": self._identity}))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        for old in whole_checkpoints(self._folder)[: -self._config.keep]:
            shutil.rmtree(old, ignore_errors=True)

    def _failure(self, step: int, error: BaseException) -> UserError:
        whole = whole_checkpoints(self._folder)
        left = f"{whole[-1].name} is whole; " if whole else ""
        reason = _reason(error, self._folder)
        if self._rank == 0:  # what was half-written only takes room
            shutil.rmtree(self._folder / f".step_{step:08d}.tmp", ignore_errors=True)
        return UserError(
            f"the checkpoint of step {step} could not be written: {reason}",
            where=str(self._folder),
            fix=f"{left}make room on the disk and start the same command again: it resumes from there",
        )


def _reason(error: BaseException, folder: Path) -> str:
    """In one line. On a full disk torch's writer stumbles over its own bookkeeping before the disk's error is seen."""
    free = shutil.disk_usage(folder).free
    if free < FULL_DISK_BYTES:
        return f"No space left on the disk ({free} bytes free)"
    for failure in getattr(error, "failures", {}).values():
        error = failure[0]
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def choose_checkpoint(folder: Path, resume: str, identity: dict[str, Any]) -> Path | None:
    """The checkpoint to go on from, or None to start anew.

    resume: `auto`, `never`, or a checkpoint's path. Raises UserError when the checkpoint is of a run that would have
    trained other weights, naming what differs.
    """
    if resume == "never":
        return None
    if resume == "auto":
        whole = whole_checkpoints(folder)
        if not whole:
            return None
        path = whole[-1]
    else:
        path = Path(resume)
        if not (path / RUN_FILE).exists():
            raise UserError(f"{path} is not a whole checkpoint", fix="name a folder …/checkpoints/step_<n>")
    saved = json.loads((path / RUN_FILE).read_text())["identity"]
    differing = sorted(key for key in {*saved, *identity} if saved.get(key) != identity.get(key))
    if differing:
        lines = [f"{key}: {saved.get(key)} there, {identity.get(key)} now" for key in differing[:12]]
        raise UserError(
            "the checkpoint is of another run:\n    " + "\n    ".join(lines),
            where=str(path),
            fix="give the same values, choose another run_dir, or start anew with resume=never",
        )
    return path


def load_checkpoint(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Fills model (and optimizer, whose state must exist: see `build_optimizer`). Returns how many steps were done.

    Without a process group it reads a sharded checkpoint into one process.
    """
    if optimizer is None:
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
        model.load_state_dict(state["model"])
    else:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
        set_state_dict(
            model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state,
            options=StateDictOptions(strict=True),
        )  # fmt: skip
    return _step(path)
