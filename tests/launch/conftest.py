"""An undisturbed run, which many tests compare theirs with."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .runs import run


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess]:
    run_dir = tmp_path_factory.mktemp("runs") / "undisturbed"
    return run_dir, run(run_dir)
