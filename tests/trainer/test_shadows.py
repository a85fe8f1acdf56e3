"""A person's own conf.py beside a run that is started by hand: it is named, and with a safe path it does no harm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def started(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["conf.py", "data_pipelines.py", "recipes.py", "launch.py"])
def test_a_file_that_is_taken_for_ours_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("raise SystemExit('a file of the person was imported')")
    done = started(tmp_path, "-m", "trainer.train", "--help")
    assert done.returncode == 1
    assert (
        done.stderr.startswith(f"error: {tmp_path / name} is taken for Draftsmith's own")
        and "\n" not in done.stderr[:-1]
    )
    imported = started(tmp_path, "-c", "import trainer")
    assert imported.stderr.splitlines()[-1].startswith(f"ImportError: {tmp_path / name} is taken for")


def test_with_a_safe_path_it_does_no_harm(tmp_path: Path) -> None:
    for name in ("conf", "data_pipelines", "launch", "recipes", "trainer"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the person was imported')")
    done = started(tmp_path, "-m", "trainer.train", "--config-name", "dmeo", PYTHONSAFEPATH="1")
    assert done.returncode != 0 and "did you mean demo?" in done.stderr, done.stderr
