"""The roles started by hand, as docs/cluster.md says: what a cluster does, on one machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_pipelines.stores.mooncake import master_command, wait_ready
from data_pipelines.stream.client import LedgerClient
from data_pipelines.stream.messages import read_token
from launch.cli import main

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture
def start():
    """Starts processes that end with the test."""
    started = []

    def go(*command: str) -> subprocess.Popen:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
        return started[-1]

    yield go
    for process in started:
        process.terminate()
    for process in started:
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()


def test_store_ledger_producers_and_torchrun_by_hand(tmp_path: Path, start) -> None:
    python, draftsmith = sys.executable, [sys.executable, "-m", "launch.cli"]
    store, metrics, ledger = free_port(), free_port(), free_port()
    master = start(*master_command("127.0.0.1", store, metrics))
    wait_ready("127.0.0.1", store, metrics, process=master)
    start(
        *draftsmith, "ledger", "ci_eagle3", f"run_dir={tmp_path}", "max_steps=3", f"cluster.ledger_port={ledger}",
        f"store.master=127.0.0.1:{store}",
    )  # fmt: skip
    token = tmp_path / "ledger.token"
    while not (tmp_path / "ledger.json").exists():
        time.sleep(0.1)
    address = ["--ledger", f"http://127.0.0.1:{ledger}", "--token-file", str(token)]
    producers = [start(*draftsmith, "produce", *address, "--name", name) for name in ("a", "b")]
    client = LedgerClient(address[1], read_token(str(token)))
    while len(client.status()["producers"]) < 2:  # one that comes after the training's end waits for the next
        assert all(producer.poll() is None for producer in producers)
        time.sleep(0.1)
    trainer = start(
        python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "trainer.train",
        "--config", str(tmp_path / "config.yaml"),
    )  # fmt: skip
    said, _ = trainer.communicate(timeout=150)
    assert trainer.returncode == 0, said
    assert json.loads((tmp_path / "training.json").read_text())["packs"] == 12
    assert [producer.wait(300) for producer in producers] == [0, 0], "they hold GPUs that nobody needs any more"
    assert main(["export", str(tmp_path)]) == 0
    assert (tmp_path / "export" / "model.safetensors").exists()
    assert (
        main(["export", str(tmp_path), "--stitch", str(tmp_path / "copy")]) == 2
    )  # only an MTP head has a place there


def test_the_last_words_of_torchrun_are_the_ranks_own_error(start) -> None:
    trainer = start(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "-m", "trainer.train", "--config-name", "dmeo"
    )  # fmt: skip
    said, _ = trainer.communicate(timeout=150)
    assert trainer.returncode != 0
    assert "error: there is no recipe 'dmeo'" in said[said.rindex("Traceback") :]
    assert "did you mean demo?" in said.splitlines()[-2]  # the last line is torchrun's ruler


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["source=colocated"], "needs no ledger"),
        ([], "cluster.ledger_port=8700"),
        (["cluster.ledger_port=8700"], "start mooncake_master"),
    ],
)
def test_a_ledger_that_nobody_could_reach_is_refused(tmp_path: Path, capfd, overrides: list[str], said: str) -> None:
    assert main(["ledger", "ci_eagle3", f"run_dir={tmp_path}", *overrides]) == 2
    assert said in capfd.readouterr().err
