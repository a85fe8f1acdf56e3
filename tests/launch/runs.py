"""Whole runs on the tiny target, as a person starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
SMALL = ["max_steps=12", "checkpoint.every=3", "evaluate.max_prompts=4", "evaluate.max_new_tokens=16"]


def command(run_dir: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "launch.cli", "run", "ci_eagle3", f"run_dir={run_dir}", *SMALL, *overrides]


def run(run_dir: Path, *overrides: str) -> subprocess.CompletedProcess:
    return subprocess.run(command(run_dir, *overrides), capture_output=True, text=True, timeout=240, cwd=ROOT)


@contextmanager
def started(run_dir: Path, *overrides: str, **environment: str) -> Iterator[tuple[subprocess.Popen, Callable[[], str]]]:
    """A run in the background, and what it has said so far. Nothing of it survives the test."""
    output = run_dir.with_suffix(".output")
    with output.open("w") as out:
        launcher = subprocess.Popen(
            command(run_dir, *overrides),
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
    family = [psutil.Process(launcher.pid)]
    try:
        yield launcher, output.read_text
    finally:
        for process in [*family, *(family[0].children(recursive=True) if family[0].is_running() else [])]:
            if process.is_running():
                process.kill()
        launcher.wait()


def wait_for(condition: Callable[[], object], launcher: subprocess.Popen, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert launcher.poll() is None, "the run has ended before"
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def gone(processes: list[psutil.Process], seconds: float = 15.0) -> list[psutil.Process]:
    """The processes that are still there after `seconds`."""
    return psutil.wait_procs(processes, timeout=seconds)[1]


def read_summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())
