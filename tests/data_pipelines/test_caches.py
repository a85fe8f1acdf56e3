"""What is made once: whole or absent, whoever is killed; by one of several processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_pipelines.caches import build_once

SCRIPT = """
import os, sys, time
from pathlib import Path
from data_pipelines.caches import build_once

def build(out):
    with open(sys.argv[2], "a") as log:
        log.write(f"{os.getpid()}\\n")
    (out / "half").write_text("done")
    time.sleep(float(sys.argv[3]))
    (out / "whole").write_text("done")

build_once(Path(sys.argv[1]), build, resumable=sys.argv[4] == "resumable")
"""


def start(folder: Path, log: Path, seconds: float, resumable: bool = False) -> subprocess.Popen:
    kind = "resumable" if resumable else "whole"
    return subprocess.Popen([sys.executable, "-c", SCRIPT, str(folder), str(log), str(seconds), kind])


def test_of_several_processes_one_builds(tmp_path):
    folder, log = tmp_path / "cache" / "thing", tmp_path / "log"
    processes = [start(folder, log, 0.5) for _ in range(4)]
    assert [p.wait(timeout=300) for p in processes] == [0] * 4
    assert len(log.read_text().split()) == 1 and (folder / "whole").exists()


@pytest.mark.parametrize("resumable", [False, True])
def test_what_a_killed_process_left_is_removed_or_gone_on_from(tmp_path, resumable):
    folder, log = tmp_path / "cache" / "thing", tmp_path / "log"
    killed = start(folder, log, 600, resumable)
    waiting = start(folder, tmp_path / "other", 0, resumable)
    until = time.monotonic() + 60
    while not (builders := log.read_text().split() if log.exists() else []):
        if (tmp_path / "other").exists():  # the second one came first and has built it
            break
        assert time.monotonic() < until
        time.sleep(0.01)
    if builders:
        assert not folder.exists()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert waiting.wait(timeout=300) == 0
    assert sorted(p.name for p in folder.iterdir()) == ["half", "whole"]
    assert [p.name for p in folder.parent.iterdir() if p.is_dir()] == ["thing"]


def test_a_failure_leaves_nothing_or_what_can_be_gone_on_from(tmp_path):
    def fail(out: Path) -> None:
        (out / "half").write_text("done")
        raise RuntimeError("no")

    def finish(out: Path) -> None:
        found.append((out / "half").exists())

    for resumable in (False, True):
        found: list[bool] = []
        with pytest.raises(RuntimeError):
            build_once(tmp_path / str(resumable), fail, resumable=resumable)
        assert not (tmp_path / str(resumable)).exists()
        build_once(tmp_path / str(resumable), finish, resumable=resumable)
        assert found == [resumable]
