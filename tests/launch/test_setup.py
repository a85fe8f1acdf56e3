"""The set-up, as far as it can be tried without making a virtual environment of a gigabyte."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with what the set-up reads."""
    folder = tmp_path / "clone"
    (folder / "launch").mkdir(parents=True)
    shutil.copy(ROOT / "launch" / "setup.sh", folder / "launch")
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copy(ROOT / "Makefile", folder)
    return folder


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def make(clone: Path, *arguments: str) -> subprocess.CompletedProcess:
    alone = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE")
    }  # not `make test`'s child
    return subprocess.run(["make", *arguments], cwd=clone, env=alone, capture_output=True, text=True, timeout=60)


def test_make_alone_lists_the_targets(clone: Path) -> None:
    listed = make(clone).stdout
    assert all(f"make {target} " in listed for target in ("setup", "demo", "test", "lint", "smoke", "clean"))


def test_a_python_that_is_not_there(clone: Path) -> None:
    done = make(clone, "setup", "PYTHON=python3.99")
    assert done.returncode != 0 and "error: there is no python3.99" in done.stderr


def test_a_python_that_is_too_old(clone: Path) -> None:
    old = script(clone / "old", 'case "$*" in *--version*) echo Python 3.9.1;; *) exit 1;; esac')
    done = make(clone, "setup", f"PYTHON={old}")
    assert done.returncode != 0 and "error: Python 3.9.1 is too old; Draftsmith needs 3.11" in done.stderr
    assert not (clone / ".venv").exists()


def test_a_set_up_killed_midway_starts_over_and_a_finished_one_costs_nothing(clone: Path) -> None:
    """With a stand-in for Python whose environments install nothing; what it was called with is the test's evidence."""
    log = clone / "calls"
    python = script(
        clone / "python",
        f"""echo "$*" >>{log}
case "$*" in
  --version) echo Python 3.11.7;;
  *"-m venv"*) mkdir -p .venv/bin && cp {clone}/python .venv/bin/python;;
  *pip*-e*) [ ! -e {clone}/killed ] || kill $PPID;;
esac""",
    )
    (clone / "killed").touch()
    assert make(clone, "setup", f"PYTHON={python}").returncode != 0
    assert (clone / ".venv" / "installing").exists()
    (clone / "killed").unlink()
    done = make(clone, "setup", f"PYTHON={python}")
    assert done.returncode == 0, done.stderr
    assert "starting over" in done.stdout and done.stdout.rstrip().endswith("setup: ready")
    log.unlink()
    again = make(clone, "setup", f"PYTHON={python}")
    assert (again.returncode, again.stdout) == (0, "")
    assert "-m pip" not in log.read_text()
    with (clone / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert "installing draftsmith" in make(clone, "setup", f"PYTHON={python}").stdout
