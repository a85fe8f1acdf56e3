"""Runs whose processes are killed, frozen or broken while they train: they end with the weights of an undisturbed one."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from launch.cli import main

from .runs import ROOT, read_summary, started, steps, wait_for

pytestmark = pytest.mark.faults

QUICK = ["evaluate=none", "cluster.hang_seconds=5", "source.lease_seconds=5"]
Finished = tuple[Path, subprocess.CompletedProcess]


def family(launcher: subprocess.Popen, *words: str) -> list[psutil.Process]:
    """The run's processes whose command line holds all these words, by age."""
    found = []
    for process in psutil.Process(launcher.pid).children(recursive=True):
        try:
            if all(word in " ".join(process.cmdline()) for word in words):
                found.append(process)
        except psutil.Error:
            continue
    return sorted(found, key=lambda process: process.create_time())


def ranks(launcher: subprocess.Popen) -> list[psutil.Process]:
    return [p for p in family(launcher, "trainer.train") if "torch.distributed.run" not in p.cmdline()]


def status(run_dir: Path, capfd: pytest.CaptureFixture) -> dict:
    capfd.readouterr()
    assert main(["status", str(run_dir), "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_a_killed_rank_and_a_killed_torchrun_cost_the_steps_since_the_last_checkpoint(
    finished: Finished, tmp_path: Path
) -> None:
    run_dir = tmp_path / "killed"
    with started(run_dir, *QUICK) as (launcher, said):
        wait_for(lambda: steps(run_dir) >= 4, launcher)
        ranks(launcher)[1].kill()
        wait_for(
            lambda: "trainer (rank 1) was ended by SIGKILL: restarted (1 of 3), going on from step" in said(), launcher
        )
        first = (run_dir / "metrics.jsonl").read_text().splitlines()[0]
        wait_for(lambda: len(ranks(launcher)) == 2 and steps(run_dir) >= 5, launcher)
        family(launcher, "torch.distributed.run")[0].kill()
        wait_for(lambda: "trainer was ended by SIGKILL: restarted (2 of 3), going on from step" in said(), launcher)
        assert launcher.wait(timeout=240) == 0, said()
    assert "restarted: trainer 2×" in said()
    rows = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert rows[0] == first  # it went on, and did not begin again
    assert [json.loads(row)["step"] for row in rows] == [*range(12)]
    assert read_summary(run_dir)["weights_sha256"] == read_summary(finished[0])["weights_sha256"]


def test_everything_frozen_is_found_ended_and_started_again(
    finished: Finished, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """SIGSTOP for both producers, a rank, the ledger and the store's master: nothing goes on until all are found."""
    run_dir = tmp_path / "frozen"
    with started(run_dir, *QUICK) as (launcher, said):
        wait_for(lambda: steps(run_dir) >= 1, launcher)
        for producer in family(launcher, "produce"):
            producer.suspend()
        # The ranks starve now. They report every second, and the launcher listens every second.
        wait_for(lambda: len(status(run_dir, capfd)["ledger"]["ranks"]) == 2, launcher)
        time.sleep(3)
        assert len(status(run_dir, capfd)["ledger"]["ranks"]) == 2
        for process in [
            ranks(launcher)[1],
            *family(launcher, "launch.cli", "ledger"),
            *family(launcher, "mooncake_master"),
        ]:
            process.suspend()
        assert launcher.wait(timeout=300) == 0, said()
    for role in ("producer-0", "producer-1", "ledger", "mooncake"):
        assert f"{role} was ended because it was silent for" in said(), role
    assert "trainer was ended because rank" in said()
    assert read_summary(run_dir)["weights_sha256"] == read_summary(finished[0])["weights_sha256"]


def test_a_trainer_that_always_fails_at_the_same_step_is_not_tried_for_ever(tmp_path: Path) -> None:
    """Through a module that Python loads by itself at its start, hence in the ranks too: a fault of our own in step 4."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "words = ' '.join(sys.orig_argv)\n"
        "if 'trainer.train' in words and 'torch.distributed.run' not in words:\n"
        "    from trainer.tracking import Tracker\n"
        "    log = Tracker.log\n"
        "    def broken(self, row):\n"
        "        if row['step'] == 4:\n"
        "            raise ValueError('step 4 has a fault')\n"
        "        log(self, row)\n"
        "    Tracker.log = broken\n"
    )
    run_dir = tmp_path / "broken"
    with started(run_dir, *QUICK, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}") as (launcher, said):
        assert launcher.wait(timeout=240) == 2, said()
    assert said().count(": restarted (") == 1
    assert "restarted (1 of 3), going on from step 3" in said()
    assert "twice at step 4 in the same way" in said() and "ValueError: step 4 has a fault" in said()


def test_an_encrypted_run_with_metrics_and_its_status_while_and_after(
    finished: Finished, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    cert, key, run_dir = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "encrypted"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=draftsmith",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    with started(run_dir, "evaluate=none", f"cluster.tls_cert={cert}", f"cluster.tls_key={key}") as (launcher, said):
        wait_for(lambda: steps(run_dir) >= 1, launcher)
        seen = status(run_dir, capfd)
        assert seen["state"] == "streaming" and {p["host"] for p in seen["ledger"]["producers"]} == {
            os.uname().nodename
        }
        assert main(["status", str(run_dir)]) == 0
        shown = capfd.readouterr().out
        assert "packs/s" in shown and "producer-1" in shown and "alive" in shown
        token, address = (
            run_dir / "ledger.token",
            f"https://127.0.0.1:{json.loads((run_dir / 'ledger.json').read_text())['port']}",
        )
        assert address in said() and token.read_text() not in said()
        assert main(["status", "--ledger", address, "--token-file", str(token)]) == 2  # not trusted without --ca-file
        assert "not trusted" in capfd.readouterr().err
        assert main(["status", "--ledger", address, "--token-file", str(token), "--ca-file", str(cert)]) == 0
        assert launcher.wait(timeout=240) == 0, said()
    assert status(run_dir, capfd)["state"] == "finished"
    assert read_summary(run_dir)["weights_sha256"] == read_summary(finished[0])["weights_sha256"]
