"""The smoke that CI runs after the tests (`make smoke`): every drafter's ci recipe, whole, as a person starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config import recipe_names
from trainer.drafters import DRAFTERS

ROOT = Path(__file__).parents[2]
RECIPES = [name for name in recipe_names() if name.startswith("ci_")]


def test_every_drafter_has_a_smoke_a_demo_and_a_production_recipe() -> None:
    names = recipe_names()
    assert sorted(RECIPES) == sorted(f"ci_{name}" for name in DRAFTERS)
    for drafter in DRAFTERS:
        assert drafter == "eagle3" or f"demo_{drafter}" in names  # eagle3's demo is `demo`
        assert any(name.endswith(f"_8b_{drafter}") for name in names)


@pytest.mark.smoke
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_whole_pipeline(recipe: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launch.cli", "run", recipe, f"run_dir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, text=True, timeout=400, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    print(done.stdout)
    assert done.returncode == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    before, after = (summary["acceptance"][when]["all"]["acceptance_length"] for when in ("before", "after"))
    assert summary["lossless"] is True
    assert after >= before + 1.0, f"{recipe}: acceptance length {before:.2f} → {after:.2f}"
