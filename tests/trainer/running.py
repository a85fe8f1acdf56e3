"""The trainer as users start it: one small recipe (colocated unless said otherwise), real torchrun, real processes.

One compute thread, since results depend on how many threads share a product; float32, so that another order of summation
changes a loss by its rounding only.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import torch

import trainer.train
from trainer.config import load_config
from trainer.parallel import process_group

ROOT = Path(__file__).parents[2]
RECIPE = [
    "source=colocated",
    "data.max_rows=60",
    "epochs=2",
    "checkpoint.every=4",
    "data.regenerate.max_new_tokens=40",
    "parallel.compute_dtype=float32",
]


def start(run_dir: Path, *overrides: str, ranks: int = 1, plain: bool = False) -> subprocess.Popen:
    launcher = [] if plain else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, "-m", "trainer.train", "--config-name", "ci_eagle3", *RECIPE]
    return subprocess.Popen(
        [*command, f"run_dir={run_dir}", *overrides],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def train(run_dir: Path, *overrides: str, status: int = 0, **options) -> str:
    process = start(run_dir, *overrides, **options)
    said, _ = process.communicate(timeout=400)
    assert process.returncode == status, said
    return said


def train_here(run_dir: Path, *overrides: str) -> None:
    """The same as one rank in this process: raises what the trainer raises."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    threads = torch.get_num_threads()
    try:
        with process_group(60) as world:
            trainer.train.train(load_config("ci_eagle3", [*RECIPE, f"run_dir={run_dir}", *overrides]), world)
    finally:
        torch.set_num_threads(threads)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def result(run_dir: Path) -> dict:
    return json.loads((run_dir / "training.json").read_text())


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def packs_by_step(said: str) -> dict[int, list[int]]:
    """From the ranks' logs: what each step consumed, over all ranks."""
    steps: dict[int, list[int]] = {}
    for step, packs in re.findall(r"role=rank-\d+ msg=step step=(\d+) packs=([\d,]+)", said):
        steps.setdefault(int(step), []).extend(map(int, packs.split(",")))
    return {step: sorted(packs) for step, packs in steps.items()}
