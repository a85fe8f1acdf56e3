"""Whole runs, as a person starts them: real store, ledger, producers, torchrun, on the tiny target."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from launch.cli import main
from trainer.checkpoint import whole_checkpoints
from trainer.seal import RUN_FILE

from .runs import command, gone, read_summary, run, started, steps, wait_for

DOMAIN_KEYS = {"acceptance_length", "prefix_rate", "conditional_rate", "rounds", "tokens"}


def test_a_run_leaves_what_it_promises(finished: tuple[Path, subprocess.CompletedProcess]) -> None:
    run_dir, done = finished
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("config.yaml", "metrics.jsonl", "quarantine.jsonl", "report.html", "export/config.json"):
        assert (run_dir / name).is_file(), name
    assert (run_dir / "export" / "model.safetensors").stat().st_size > 0
    assert {path.stem for path in (run_dir / "logs").iterdir()} >= {
        "mooncake", "ledger", "producer-0", "producer-1", "trainer",
    }  # fmt: skip
    assert [path.name for path in whole_checkpoints(run_dir / "checkpoints")][-1] == "step_00000012"
    assert [row["step"] for row in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())] == [
        *range(12)
    ]
    assert os.stat(run_dir / "ledger.token").st_mode & 0o077 == 0


def test_the_summary_has_every_promised_key(finished: tuple[Path, subprocess.CompletedProcess]) -> None:
    run_dir, done = finished
    summary = read_summary(run_dir)
    assert set(summary) == {
        "recipe", "target", "drafter", "world_size", "producers", "steps", "packs", "tokens", "seconds",
        "tokens_per_second", "wait_fraction", "loss", "trained_share", "weights_sha256", "acceptance", "not_judged",
        "lossless", "export",
    }  # fmt: skip
    assert (summary["recipe"], summary["drafter"], summary["target"]) == ("ci_eagle3", "eagle3", "draftsmith/tiny")
    assert (summary["world_size"], summary["producers"], summary["steps"], summary["packs"]) == (2, 2, 12, 48)
    assert summary["lossless"] is True and summary["not_judged"] is None
    assert 0 <= summary["wait_fraction"] < 1
    assert summary["loss"]["last"] < summary["loss"]["first"]
    for when in ("before", "after"):
        assert "all" in summary["acceptance"][when] and len(summary["acceptance"][when]) > 1
        for numbers in summary["acceptance"][when].values():
            assert set(numbers) >= DOMAIN_KEYS and numbers["acceptance_length"] >= 1
    assert "lossless      yes" in done.stdout and "try next:" in done.stdout


def test_the_report_needs_nothing_else(finished: tuple[Path, subprocess.CompletedProcess]) -> None:
    run_dir, _ = finished
    html = (run_dir / "report.html").read_text()
    assert html.count("<svg") == 3
    assert "src=" not in html and "<link" not in html and "<script" not in html
    for wanted in (
        "draftsmith/tiny",
        "conditional",
        "do not make a drafter to serve with",
        "pack_tokens: 256",
        "arithmetic",
    ):
        assert wanted in html


def test_a_finished_run_is_not_run_again(finished: tuple[Path, subprocess.CompletedProcess]) -> None:
    run_dir, _ = finished
    before = read_summary(run_dir)
    again = run(run_dir)
    assert again.returncode == 0, again.stderr
    assert "all 12 steps were done already" in again.stdout
    assert read_summary(run_dir) == before


@pytest.mark.faults
def test_interrupted_at_any_time_it_ends_whole_and_goes_on_to_the_same_weights(
    finished: tuple[Path, subprocess.CompletedProcess], tmp_path: Path
) -> None:
    """A producer and the ledger are killed, then Ctrl-C; then the same command again: bit-identical weights."""
    run_dir = tmp_path / "interrupted"
    with started(run_dir) as (launcher, said):
        wait_for(lambda: steps(run_dir) >= 1, launcher)
        family = psutil.Process(launcher.pid).children(recursive=True)
        for role in ("produce", "ledger"):
            next(p for p in family if p.is_running() and role in p.cmdline()).kill()
        wait_for(lambda: said().count(": restarted (1 of 3)") == 2, launcher)
        family += psutil.Process(launcher.pid).children(recursive=True)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(timeout=300) == 130, said()
    assert gone(family) == []
    kept = whole_checkpoints(run_dir / "checkpoints")
    assert kept and all((path / RUN_FILE).exists() for path in kept)
    step = json.loads((kept[-1] / RUN_FILE).read_text())["step"]
    assert step == steps(run_dir)  # asked to stop, the trainer saves what it has done
    assert f"{step} steps are saved" in said() and "Traceback" not in said()
    assert not (run_dir / "summary.json").exists()
    done = run(run_dir)
    assert done.returncode == 0, done.stderr
    assert f"going on from step {step}" in done.stdout
    assert read_summary(run_dir)["weights_sha256"] == read_summary(finished[0])["weights_sha256"]


@pytest.mark.parametrize("source", ["colocated", "offline"])
def test_every_source_gives_the_same_weights(
    finished: tuple[Path, subprocess.CompletedProcess], tmp_path: Path, source: str
) -> None:
    done = run(tmp_path / source, f"source={source}", "evaluate=none")
    assert done.returncode == 0, done.stderr
    assert read_summary(tmp_path / source)["weights_sha256"] == read_summary(finished[0])["weights_sha256"]
    assert read_summary(tmp_path / source)["acceptance"] == {"before": {}, "after": {}}


def test_later_epochs_from_the_cache_give_the_weights_of_the_stream(tmp_path: Path) -> None:
    """Two epochs: hybrid reads the second one from its folder of files, stream has it computed again."""
    two_epochs = ["data.max_rows=30", "epochs=2", "evaluate=none", "max_steps=0"]
    weights = []
    for source in ("hybrid", "stream"):
        done = run(tmp_path / source, f"source={source}", *two_epochs)
        assert done.returncode == 0, done.stderr
        weights.append(read_summary(tmp_path / source)["weights_sha256"])
    assert weights[0] == weights[1]
    stored = list((tmp_path / "hybrid" / "features").glob("*.safetensors"))
    assert 0 < len(stored) < read_summary(tmp_path / "hybrid")["packs"]  # fewer were streamed than trained on


@pytest.mark.faults
def test_children_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "killed"
    with started(run_dir) as (launcher, _):
        wait_for(lambda: steps(run_dir) >= 1, launcher)
        family = psutil.Process(launcher.pid).children(recursive=True)
        roles = " ".join(word for process in family for word in process.cmdline())
        assert all(name in roles for name in ("mooncake_master", "ledger", "produce", "trainer.train"))
        launcher.kill()
        launcher.wait()
        assert gone(family, seconds=45) == []


def test_two_runs_do_not_share_a_folder(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    run_dir = tmp_path / "shared"
    with started(run_dir) as (launcher, said):
        wait_for(lambda: "target" in said(), launcher)
        assert main(command(run_dir)[3:]) == 2
        assert "another draftsmith runs in this folder" in capfd.readouterr().err
        launcher.send_signal(signal.SIGTERM)  # to be started again: not the status of a failure
        assert launcher.wait(timeout=300) == 75


def test_a_trainer_that_fails_ends_the_run_with_its_own_words(tmp_path: Path) -> None:
    """A learning rate that blows up: the trainer says so, and nothing is left running."""
    done = run(tmp_path / "diverged", "optim.lr=1e30", "evaluate=none")
    assert done.returncode == 2
    assert "the gradient is not finite" in done.stderr and "lower optim.lr" in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) < 20
    strays = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    assert strays == []
