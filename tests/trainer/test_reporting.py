"""What others see of a rank: a real ledger's status page, a real Prometheus endpoint; and nothing of it is ever fatal."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from collections import Counter
from itertools import pairwise

import pytest
import torch

from data_pipelines.errors import UserError
from tests.data_pipelines.stream.conftest import LedgerThread, wait_until
from trainer.parallel import World
from trainer.reporting import Progress, RankMetrics, Reporter, serve_metrics


def row(step: int, loss: float | None = 2.0) -> dict:
    return {
        "step": step, "loss": loss, "expected_length": 1.5, "wait_seconds": 0.25, "seconds": 1.0, "tokens": 100, "lr": 1.0,
    }  # fmt: skip


def step(progress: Progress, run_dir, number: int, **options) -> None:
    made = row(number, **options)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(made) + "\n")
    progress.stepped(made, seconds=1.0, waited=0.5, tokens=50)


def rank(number: int) -> World:
    return World(number, 2, torch.device("cpu"))


def test_the_status_shows_the_ranks_and_the_curve_also_after_the_ledger_was_restarted(tmp_path):
    ledger = LedgerThread(tmp_path)
    progress = Progress(3, 40)
    for number in range(3):  # of an earlier start: they are in the file only
        step(Progress(0, 40), tmp_path, number)
    reporters = [Reporter(ledger.client(), progress, rank(number), "a-session", tmp_path) for number in range(2)]
    step(progress, tmp_path, 3, loss=float("nan"))
    try:
        wait_until(lambda: [r["step"] for r in ledger.status()["ranks"]] == [4, 4], 20)
        first = ledger.status()["ranks"][0]
        assert (first["rank"], first["world_size"], first["total_steps"], first["wait_fraction"]) == (0, 2, 40, 0.5)
        wait_until(lambda: [point["step"] for point in ledger.status()["curve"]] == [0, 1, 2, 3], 20)
        assert ledger.status()["curve"][3]["loss"] is None
        ledger.stop()
        step(progress, tmp_path, 4, loss=None)  # nothing was trained
        time.sleep(1.5)  # a report is lost
        ledger = LedgerThread(tmp_path, port=ledger.port)
        wait_until(lambda: [point["step"] for point in ledger.status()["curve"]] == [0, 1, 2, 3, 4], 20)
    finally:
        for reporter in reporters:
            reporter.close(done=False)
        assert not ledger.status()["finished"]
        ledger.stop()


def test_without_a_ledger_nothing_is_reported_and_one_that_is_away_does_no_harm(tmp_path, caplog):
    Reporter(None, Progress(0, 1), rank(0), "s", tmp_path).close(done=True)
    ledger = LedgerThread(tmp_path)
    client = ledger.client()
    ledger.stop()
    reporter = Reporter(client, Progress(0, 1), rank(0), "s", tmp_path)
    wait_until(lambda: "no report to the ledger" in caplog.text, 20)
    reporter.close(done=True)
    assert caplog.text.count("no report to the ledger") == 1


def test_prometheus_can_ask_a_rank(tmp_path):
    progress = Progress(0, 40)
    step(progress, tmp_path, 0)
    counts = Counter(packs=7, bytes=1234, lost=1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    serve_metrics(RankMetrics(progress, counts, 1), "127.0.0.1", port)
    step(progress, tmp_path, 1, loss=1.5)
    counts["packs"] += 1
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    for line in (
        'draftsmith_rank_step{rank="1"} 2.0',
        'draftsmith_rank_loss{rank="1"} 1.5',
        'draftsmith_rank_wait_fraction{rank="1"} 0.5',
        'draftsmith_rank_tokens_per_second{rank="1"} 50.0',
        'draftsmith_rank_packs_total{rank="1"} 8.0',
        'draftsmith_rank_bytes_total{rank="1"} 1234.0',
        'draftsmith_rank_lost_total{rank="1"} 1.0',
        "process_resident_memory_bytes ",
    ):
        assert line in text, text
    step(progress, tmp_path, 2, loss=None)  # nothing was trained
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    assert 'draftsmith_rank_loss{rank="1"} NaN' in text
    with pytest.raises(UserError, match="cannot be served"):
        serve_metrics(RankMetrics(progress, counts, 1), "127.0.0.1", port)


def test_a_long_curve_is_thinned_and_keeps_its_end(tmp_path):
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(row(number)) + "\n" for number in range(1234))
    sent = Reporter(None, Progress(0, 1), rank(0), "s", tmp_path)._all_rows()
    assert len(sent) <= 500 and sent[-1]["step"] == 1233
    assert {b["step"] - a["step"] for a, b in pairwise(sent)} == {3}
