"""What `draftsmith status` says when no ledger answers, and how it tells the living from the hanging."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from rich.console import Console

from data_pipelines.stream.ledger import Ledger
from launch.cli import main
from launch.views.status import Place, render

CONFIG = "source: {ledger: 'http://127.0.0.1:1', token_file: TOKEN, ca_file: ''}\ncluster: {hang_seconds: 30.0}\n"


def checkpoint(run_dir: Path, step: int) -> None:
    folder = run_dir / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "run.json").touch()


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """The folder of a run that has begun and whose ledger is gone."""
    (tmp_path / "ledger.token").write_text("secret")
    (tmp_path / "config.yaml").write_text(CONFIG.replace("TOKEN", str(tmp_path / "ledger.token")))
    return tmp_path


def says(run_dir: Path, capfd: pytest.CaptureFixture) -> tuple[str, str]:
    assert main(["status", str(run_dir), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert "ledger" not in found
    return found["state"], found["says"]


def test_the_folder_tells_how_far_a_run_came(begun: Path, capfd: pytest.CaptureFixture) -> None:
    assert says(begun, capfd)[0] == "interrupted"
    checkpoint(begun, 3)
    checkpoint(begun, 12)
    state, text = says(begun, capfd)
    assert state == "interrupted" and "12 steps are saved" in text
    with FileLock(begun / ".lock"):
        code = "from launch.cli import main; main(['status', sys.argv[1], '--json'])"
        other = subprocess.run(
            [sys.executable, "-c", f"import sys; {code}", str(begun)], capture_output=True, text=True, check=True
        )
    found = json.loads(other.stdout)
    assert found["state"] == "running" and "No ledger answers at http://127.0.0.1:1" in found["says"]
    (begun / "training.json").write_text("{}")
    assert says(begun, capfd)[0] == "trained"
    (begun / "summary.json").write_text(json.dumps({"steps": 12}))
    assert says(begun, capfd) == ("finished", f"Finished: 12 steps; see {begun / 'report.html'}.")


def test_a_folder_without_a_run(tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert says(tmp_path, capfd)[0] == "not started"
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 2
    assert "there is no run in" in capfd.readouterr().err
    (tmp_path / "outputs" / "demo").mkdir(parents=True)
    (tmp_path / "outputs" / "demo" / "config.yaml").write_text("source: {ledger: ''}\n")
    assert main(["status"]) == 0  # the newest one
    assert "outputs/demo" in capfd.readouterr().out


def test_it_starts_without_loading_torch(begun: Path) -> None:
    code = (
        f"import sys; from launch.cli import main; main(['status', {str(begun)!r}]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_one_screen_of_a_ledger(begun: Path) -> None:
    """The ledger's own snapshot; of its callers, one of each state by age."""
    snapshot = Ledger(lease_seconds=60, max_attempts=3, clock=lambda: 0.0).snapshot()
    rank = {"rank": 0, "world_size": 3, "host": "h", "pid": 1, "step": 7, "total_steps": 20, "wait_fraction": None}
    snapshot["ranks"] = [{**rank, "rank": i, "seen": age} for i, age in enumerate((1.0, 20.0, 40.0))]
    snapshot["errors"] = [{"ago": 3.0, "who": "producer-0", "message": "[red]not markup[/red]"}]
    console = Console(width=100, record=True, file=None, quiet=False)
    with console.capture() as shown:
        console.print(render({"run_dir": "outputs/x", "ledger": snapshot}, Place(begun, rank_patience=30.0)))
    text = shown.get()
    assert "step 7 of 20" in text and "[red]not markup[/red]" in text
    assert [line.split()[1] for line in text.splitlines() if " h 1 " in line] == ["alive", "late", "hung"]
