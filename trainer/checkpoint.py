"""Checkpoints: torch's distributed checkpoint (how), and when, which and whether it is this run's (here).

A checkpoint is a folder `step_<n>` that appears by a rename after everything in it was written and sealed (`seal.py`);
none is loaded without a look at every byte.
"""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from data_pipelines.errors import UserError
from data_pipelines.run_folder import RunFolder

from .parallel import Strategy, World
from .seal import Broken, Seal, read_seal, seal, sync, verify

log = logging.getLogger("trainer")

_ONLY_TOLD = {"drafter.init"}  # where it lay; what it was is in drafter.init_sha256
FULL_DISK_BYTES = 16 * 1024**2


@dataclass
class CheckpointConfig:
    """every: steps between checkpoints; 0: only the one that is always written at the end. keep: how many of the newest stay.
    keep_every: those of every so many steps stay too, as milestones; 0: none."""

    every: int = 50
    keep: int = 2
    keep_every: int = 0
    asynchronous: bool = True

    def __post_init__(self) -> None:
        if self.every < 0:
            raise UserError(f"checkpoint.every={self.every}; 0 writes one at the end alone")
        if self.keep < 1:
            raise UserError(f"checkpoint.keep={self.keep}; at least the newest must stay")
        if self.keep_every < 0:
            raise UserError(f"checkpoint.keep_every={self.keep_every}; 0 keeps no milestones")


@dataclass(frozen=True)
class Changes:
    """Dotted config keys. allowed: those that the person lets differ from the checkpoint's (`allow=[…]`). possible: those
    that can be allowed at all."""

    allowed: frozenset[str] = frozenset()
    possible: frozenset[str] = frozenset()


NO_CHANGES = Changes()


def saved_checkpoints(folder: Path) -> dict[int, Path]:
    """Step → folder of every checkpoint that was once whole, oldest first. Only `verify` tells whether it still is."""
    found = {path.name.removeprefix("step_"): path for path in folder.glob("step_*")}
    return {int(step): found[step] for step in sorted(found) if step.isdecimal()}


def whole_checkpoints(folder: Path) -> list[Path]:
    """Those of a run that are whole, oldest first; reads all of them."""
    return [path for path in saved_checkpoints(folder).values() if _damage(path) is None]


def forget_later_checkpoints(folder: Path, step: int) -> None:
    """The run goes back to `step`: whoever starts again goes on from there."""
    for later, path in saved_checkpoints(folder).items():
        if later > step:
            shutil.rmtree(path, ignore_errors=True)


def newest_step(run_dir: Path) -> int:
    """How many steps the newest whole checkpoint of a run holds; 0 without one."""
    return _newest_step(RunFolder(run_dir).checkpoints)


def _newest_step(folder: Path) -> int:
    saved = saved_checkpoints(folder)
    return next((step for step, path in reversed(saved.items()) if _damage(path) is None), 0)


def find_checkpoint(run_dir: Path, step: int | None = None) -> Path:
    """The newest checkpoint of a run, or the one of `step`.

    Raises UserError when it is not there, and when it is broken: another one would be another drafter.
    """
    saved = saved_checkpoints(RunFolder(run_dir).checkpoints)
    if not saved:
        raise UserError(
            "this run has no whole checkpoint", where=str(run_dir), fix="train first: draftsmith run <recipe>"
        )
    if step is not None and step not in saved:
        there = ", ".join(map(str, saved))
        raise UserError(f"there is no checkpoint of step {step}", where=str(run_dir), fix=f"there are {there}")
    chosen = saved[max(saved) if step is None else step]
    damage = _damage(chosen)
    if damage is not None:
        whole = [str(number) for number, path in saved.items() if path != chosen and _damage(path) is None]
        raise UserError(
            f"the checkpoint {chosen.name} is broken: {damage}",
            where=str(chosen),
            fix=f"train on to make it again, or take a whole one (step {', '.join(whole) or '– there is none'})",
        )
    return chosen


def _damage(path: Path) -> str | None:
    try:
        verify(path)
    except Broken as broken:
        return str(broken)
    return None


class Checkpointer:
    """Saves in the background over a process group of its own (on the default group, an asynchronous save and FSDP's own
    collectives deadlock). Rank 0 seals and publishes, in the background too: it reads everything once more for that. A
    failed save is raised at the next call of `save`, `check` or `close`."""

    def __init__(self, folder: Path, config: CheckpointConfig, identity: dict[str, Any]):
        self._folder, self._config, self._identity = folder, config, identity
        self._rank = dist.get_rank()
        self._group = dist.new_group(backend="gloo")
        self._pending: tuple[int, Future] | None = None
        self._publisher = ThreadPoolExecutor(1, "publish")
        self._saved = -1
        for left in folder.glob(".step_*.tmp") if self._rank == 0 else ():  # of a save that was killed
            shutil.rmtree(left, ignore_errors=True)

    def due(self, step: int, total: int) -> bool:
        """After `step` steps are done."""
        return step == total or (self._config.every > 0 and step % self._config.every == 0)

    def save(self, step: int, strategy: Strategy, *, wait: bool = False) -> None:
        self._finish()
        if step == self._saved:
            return
        temporary = self._folder / f".step_{step:08d}.tmp"
        if self._rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            self._folder.mkdir(parents=True, exist_ok=True)
        state = strategy.state()
        writer = dcp.FileSystemWriter(temporary, sync_files=True)
        try:
            if self._config.asynchronous and not wait:
                future = dcp.async_save(state, storage_writer=writer, process_group=self._group)
                self._pending = (step, self._publisher.submit(self._publish_after, future, step))
            else:
                dcp.save(state, storage_writer=writer, process_group=self._group)
                self._publish(step)
            self._saved = step
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            raise self._failure(step, error) from error

    def check(self) -> None:
        """Raises what went wrong with a background save that has ended."""
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

    def _publish_after(self, written: Future, step: int) -> None:
        written.result()
        self._publish(step)

    def _publish(self, step: int) -> None:
        """On rank 0, whose save returns after every rank's data and the metadata are on disk."""
        if self._rank != 0:
            return
        final = self._folder / f"step_{step:08d}"
        temporary = self._folder / f".step_{step:08d}.tmp"
        seal(temporary, step, self._identity)
        shutil.rmtree(final, ignore_errors=True)  # broken, or of steps that have just been done again
        os.replace(temporary, final)
        sync(self._folder)
        self._retain(step)

    def _retain(self, newest: int) -> None:
        """Delete what the policy does not keep. The one of step `newest` was written just now, hence is good.

        Those of later steps go: the run has gone back behind them, because they are broken or because it was told to, and
        a broken one must not count as one of the newest.
        """
        saved = saved_checkpoints(self._folder)
        steps = [step for step in saved if step <= newest]
        kept = set(steps[-self._config.keep :])
        if self._config.keep_every:
            kept |= {step for step in steps if step % self._config.keep_every == 0}
        for step in saved.keys() - kept:
            shutil.rmtree(saved[step], ignore_errors=True)

    def _failure(self, step: int, error: BaseException) -> UserError:
        whole = _newest_step(self._folder)
        left = f"step_{whole:08d} is whole; " if whole else ""
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


def choose_checkpoint(
    folder: Path, resume: str, identity: dict[str, Any], changes: Changes = NO_CHANGES, total_steps: int | None = None
) -> Path | None:
    """The checkpoint to go on from, every byte of it verified, or None to start anew.

    resume: `auto`, `never`, or a checkpoint's path. `auto` takes the newest whole one and warns of broken ones that it
    passes over. changes: what of the identity may differ; what does is logged. total_steps: of the run as it is now.
    Raises UserError when the named one, or every one, is broken, when it is of a run that would have trained other
    weights, naming what differs and how to allow it, and when it is of more steps than the run has.
    """
    if resume == "never":
        return None
    path, found = _newest_whole(folder) if resume == "auto" else _named(Path(resume), folder)
    if path is None:
        return None
    _compare(path, found.identity, identity, changes)
    if total_steps is not None and found.step > total_steps:
        raise UserError(
            f"the checkpoint is of {found.step} steps, and the run has {total_steps} now",
            where=str(path),
            fix="raise max_steps or epochs, or name an earlier checkpoint with resume=<run_dir>/checkpoints/step_<n>",
        )
    return path


def _compare(path: Path, saved: dict[str, Any], identity: dict[str, Any], changes: Changes) -> None:
    differing = sorted(
        key for key in {*saved, *identity} if saved.get(key) != identity.get(key) and key not in _ONLY_TOLD
    )
    told = {key: f"{key}: {saved.get(key)} there, {identity.get(key)} now" for key in differing}
    refused = [key for key in differing if key not in changes.allowed]
    if not refused:
        for key in differing:
            log.warning("going on from %s with another value, as allowed: %s", path.name, told[key])
        return
    same = "give the same values, choose another run_dir, or start anew with resume=never"
    fixed = [key for key in refused if key not in changes.possible]
    refused.sort(key=lambda key: key not in fixed)  # what cannot be allowed is said first
    allow = ",".join(sorted(changes.allowed | set(refused)))
    raise UserError(
        "the checkpoint is of another run:\n    " + "\n    ".join(told[key] for key in refused[:12]),
        where=str(path),
        fix=same if fixed else f"to go on from it with the new values, add 'allow=[{allow}]'; or {same}",
    )


def _newest_whole(folder: Path) -> tuple[Path, Seal] | tuple[None, None]:
    broken: list[str] = []
    for path in reversed(saved_checkpoints(folder).values()):
        try:
            found = verify(path)
        except Broken as error:
            broken.append(f"{path.name}: {error}")
            continue
        for damage in broken:
            log.warning("a checkpoint is broken and passed over: %s; going on from %s instead", damage, path.name)
        return path, found
    if broken:
        raise UserError(
            "every checkpoint of this run is broken:\n    " + "\n    ".join(broken),
            where=str(folder),
            fix="look after the disk; put a whole one back, or start anew with resume=never",
        )
    return None, None


def _named(path: Path, folder: Path) -> tuple[Path, Seal]:
    if path.resolve().parent != folder.resolve():
        raise UserError(
            f"resume={path} is not a checkpoint of this run",
            where=str(folder),
            fix=f"name one of {', '.join(p.name for p in saved_checkpoints(folder).values()) or 'its own, once it has some'}"
            ", or set run_dir to the run that it belongs to",
        )
    try:
        return path, verify(path)
    except Broken as error:
        raise UserError(
            f"{path} is not a whole checkpoint: {error}", fix="name a whole …/checkpoints/step_<n>, or use resume=auto"
        ) from error


def agree_on_checkpoint(folder: Path, resume: str, identity: dict[str, Any], world: World, *but: Any) -> Path | None:
    """`choose_checkpoint` by rank 0 (but: its last arguments), for all ranks: each then makes sure that it sees the very
    same checkpoint.

    Raises UserError on every rank when rank 0 refuses, or when some rank sees another one.
    """
    chosen, refusal, told = None, None, [0, 0, 0]
    if world.rank == 0:
        try:
            chosen = choose_checkpoint(folder, resume, identity, *but)
            told = [1, 0, 0] if chosen is None else [1, *_fingerprint(chosen)]
        except UserError as error:
            refusal = error
    accepted, step, checksum = world.from_first(told)
    if not accepted:
        raise refusal or UserError("rank 0 cannot go on from the checkpoint", fix="see what rank 0 says")
    if not checksum:
        return None
    path = folder / f"step_{step:08d}" if resume == "auto" else Path(resume)
    try:
        same = _fingerprint(path) == (step, checksum)
    except Broken:
        same = False
    wrong = world.sum(torch.tensor([0.0 if same else 1.0], device=world.device))
    if wrong.item():
        raise UserError(
            f"{int(wrong.item())} of {world.size} ranks do not see the checkpoint that rank 0 goes on from"
            + ("" if same else f"; rank {world.rank} is one of them"),
            where=str(path),
            fix="run_dir must be a folder that all machines share",
        )
    return path


def _fingerprint(path: Path) -> tuple[int, int]:
    """The step, and a checksum that is a positive int64."""
    found = read_seal(path)
    return found.step, int(found.checksum, 16) >> 1 or 1


def load_checkpoint(path: Path, strategy: Strategy) -> int:
    """Weights and moments, into any mode and number of ranks. Returns how many steps were done.

    Raises UserError when the moments are not of that many steps: an optimizer that silently began anew would not be seen
    in the loss for long.
    """
    strategy.fill(partial(dcp.load, checkpoint_id=path))
    step, seen = read_seal(path).step, strategy.steps_in_moments
    if seen != step:
        raise UserError(
            f"the checkpoint is of {step} steps and its moments of {seen}",
            where=str(path),
            fix="take another one, or start anew with resume=never",
        )
    return step


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The drafter's tensors, whatever they are, in one process without a process group."""
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    names = {name.removeprefix("model."): found for name, found in stored.items() if name.startswith("model.")}
    state = {name: torch.empty(found.size, dtype=found.properties.dtype) for name, found in names.items()}
    _load_alone({"model": state}, path)
    return state


def load_weights(path: Path, drafter: torch.nn.Module) -> None:
    """Only the weights, into one process without a process group."""
    _load_alone({"model": drafter.state_dict()}, path)


def _load_alone(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process reads it: as meant
        dcp.load(state, checkpoint_id=path, no_dist=True)
