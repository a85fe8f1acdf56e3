"""`draftsmith run`: a whole run on this machine, stage by stage, from prompts to the report.

Each stage keeps what it made in the run's folder, so that the same command, given again after whatever happened, does
only what is missing.
"""

from __future__ import annotations

import argparse
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from data_pipelines.engines import resolve_target
from data_pipelines.errors import UserError
from data_pipelines.files import write_text_atomically
from data_pipelines.run_folder import RunFolder
from trainer.config import RunConfig, load_config, read_config, save_config
from trainer.export.run import export_run
from trainer.setup import RunSetup, prepare_run

from .placement import LocalPlacement, Placement
from .slurm.queue import begun_before, remember_beginning
from .stages import data, preflight, report, results
from .stages.training import train
from .supervision.processes import Stopped, Terminated
from .supervision.screen import Screen
from .views.plan import show_plan


def command(arguments: argparse.Namespace) -> int:
    if not arguments.recipe and not arguments.config:
        raise UserError("run takes a recipe, or --config", fix="draftsmith run --help")
    if arguments.config:
        config = go_on(read_config(Path(arguments.config), [*filter(None, [arguments.recipe]), *arguments.overrides]))
    else:
        config = load_config(arguments.recipe, arguments.overrides, arguments.config_dir)
    screen = Screen()
    if arguments.plan:
        show_plan(config, screen)
        return 0
    with stopping_on_signals():
        run(config, screen)
    return 0


def go_on(config: RunConfig) -> RunConfig:
    """A Slurm job that was requeued goes on from its own checkpoints, wherever it was told to begin. The trainer writes
    resume=auto when what was there before is out of the way."""
    run_dir = Path(config.run_dir)
    return replace(config, resume=read_config(RunFolder(run_dir).config).resume) if begun_before(run_dir) else config


def run(config: RunConfig, screen: Screen) -> dict[str, Any]:
    """All stages; returns the summary. Raises UserError with the cause, and Stopped when it was interrupted."""
    run_dir = Path(config.run_dir)
    screen.line(f"draftsmith run {config.recipe} → {run_dir}")
    with screen.stage("check") as note:
        placement = _find_placement(config)
        config = replace(config, cluster=replace(config.cluster, host=placement.host))
        ports = preflight.check(config, run_dir, placement)
        note("folder, disk, store and ports are fine" if ports else "folder and disk are fine")
    with only_run_in(run_dir):
        if config.resume == "never":
            start_afresh(run_dir, screen)
        with screen.stage("target") as note:
            target = resolve_target(config.target)
            note(data.describe_target(target))
        with screen.stage("judge") as note:
            note(results.place_judge(config, target))
        with screen.stage("data") as note:
            setup = _prepare(config, run_dir)
            save_config(config, RunFolder(run_dir).config)
            remember_beginning(run_dir)
            note(data.describe(setup))
        return _learn_and_judge(setup, placement, ports, screen)


def _prepare(config: RunConfig, run_dir: Path) -> RunSetup:
    """Raises UserError when the folder holds another run, and then leaves everything in it as it was."""
    quarantine = RunFolder(run_dir).quarantine
    before = quarantine.read_text() if quarantine.exists() else None
    setup = prepare_run(config)
    try:
        setup.choose_checkpoint()
    except UserError:
        quarantine.unlink() if before is None else write_text_atomically(quarantine, before)
        raise
    return setup


def _learn_and_judge(setup: RunSetup, placement: Placement, ports: dict[str, int], screen: Screen) -> dict[str, Any]:
    run_dir, agreement = setup.run_dir, None
    if setup.config.data.regenerate.mode == "sample":
        with screen.stage("sample") as note:
            agreement = data.sample_agreement(setup)
            note(f"the target gives {agreement['same']} of {agreement['of']} answers again, token for token")
    with screen.stage("before") as note:
        before = results.judge(setup, "before")
        note(results.describe(before))
    with screen.stage("train") as note:
        note(train(setup, placement, ports, screen))
    with screen.stage("export") as note:
        exported = export_run(setup)
        note(str(exported))
    with screen.stage("after") as note:
        after = results.judge(setup, "after")
        note(results.describe(after))
    with screen.stage("report") as note:
        summary = results.summarise(setup, before, after, exported)
        report.write_report(summary, setup.config, {"counts": data.counts(setup), "agreement": agreement}, run_dir)
        note(str(RunFolder(run_dir).report))
    screen.console.print()
    screen.console.print(report.table(summary))
    for warning in report.warnings(summary):
        screen.line(f"\nwarning: {warning}")
    screen.line(f"\ntry next: {next_command(setup.config)}")
    return summary


def _find_placement(config: RunConfig) -> Placement:
    """Raises UserError for cluster.launcher=slurm outside of a Slurm job."""
    if config.cluster.launcher == "slurm":
        from .slurm.nodes import nodes_of_this_job

        return nodes_of_this_job(config)
    return LocalPlacement(config.cluster, config.cluster.host)


def next_command(config: RunConfig) -> str:
    """One command that is worth trying after this run."""
    if config.target.kind == "tiny":
        return "draftsmith run demo"
    if config.target.kind == "smollm2_135m":
        return "draftsmith run demo target=hf target.path=<your model> data.regenerate.mode=always run_dir=outputs/mine"
    return f"draftsmith evaluate {config.run_dir} evaluate.max_prompts=200"


def start_afresh(run_dir: Path, screen: Screen) -> None:
    """resume=never: what an earlier run left in this folder is removed; logs are kept."""
    found = [path for path in RunFolder(run_dir).results if path.exists()]
    for path in found:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if found:
        screen.line(f"  resume=never: removed {', '.join(path.name for path in found)} of an earlier run")


@contextmanager
def only_run_in(run_dir: Path) -> Iterator[None]:
    """Two runs in one folder would overwrite each other. The lock goes with the process that holds it."""
    lock = FileLock(run_dir / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(
            "another draftsmith runs in this folder", where=str(run_dir), fix="choose run_dir=<path>"
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise Stopped in the main thread, also where the shell started us with SIGINT ignored. A second
    Ctrl-C is somebody who cannot wait; a second SIGTERM is not (scancel sends it to the job's shell, which hands it on, and
    to us)."""

    def stop(number: int, frame: Any) -> None:
        if number == signal.SIGINT:
            raise Stopped
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
