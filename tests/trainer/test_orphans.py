"""A rank whose torchrun is killed ends too, however early that was."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from .running import ROOT

# Starts a rank as torchrun does, says its process id, and dies when it is told to.
AGENT = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-m", "trainer.train", *sys.argv[1:]]).pid, flush=True)
sys.stdin.read()
"""


def ended(process: psutil.Process, seconds: float) -> bool:
    return not psutil.wait_procs([process], timeout=seconds)[1]


@pytest.mark.parametrize("moment", ["imports", "trains"])
def test_a_rank_ends_with_its_torchrun(tmp_path: Path, moment: str) -> None:
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, "--config-name", "ci_eagle3", "source=colocated", f"run_dir={tmp_path}"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "test"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    rank = psutil.Process(int(agent.stdout.readline()))
    if moment == "trains":
        while not (tmp_path / "metrics.jsonl").exists():
            assert rank.is_running() and agent.poll() is None
            time.sleep(0.1)
    else:
        while not any(
            "libtorch" in mapped.path for mapped in rank.memory_maps()
        ):  # trainer/__init__.py was read before
            time.sleep(0.01)
    agent.kill()
    agent.wait()
    assert ended(rank, 60)
    assert not (tmp_path / "training.json").exists(), "the orphan trained to the end"
    if moment == "imports":
        assert not (tmp_path / "config.yaml").exists(), "the orphan began to train"


def test_without_torchrun_a_shell_may_end_before_its_training(tmp_path: Path) -> None:
    shell = subprocess.Popen(
        ["sh", "-c", f"{sys.executable} -m trainer.train --config-name ci_eagle3 source=colocated run_dir={tmp_path} "
         "max_steps=2 data.max_rows=20 & sleep 0.5"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TORCHELASTIC_RUN_ID"} | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert shell.wait() == 0
    deadline = time.monotonic() + 300
    while not (tmp_path / "training.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.2)
