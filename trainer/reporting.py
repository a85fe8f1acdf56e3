"""How a rank stands, for those who watch: reports to the ledger (its status page), and Prometheus metrics.

Nothing here can stop or slow the training: reports come from a thread of their own, and one that fails is left out.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from data_pipelines.errors import UserError
from data_pipelines.stream.client import LedgerClient, StreamError

from .parallel import World
from .tracking import read_metrics

log = logging.getLogger("trainer")

_REPORT_SECONDS = 1.0
_CLOSE_SECONDS = 5.0
_RECENT_STEPS = 20
_MOST_ROWS = 500
_ROW = ("step", "loss", "expected_length", "wait_seconds", "seconds", "tokens")


class Progress:
    """What the loop has done so far. step: optimizer steps that are done. Rates are over the last 20 steps of this rank."""

    def __init__(self, step: int, total_steps: int):
        self.step, self.total_steps, self.loss = step, total_steps, float("nan")
        self._recent: deque[tuple[float, float, int]] = deque(maxlen=_RECENT_STEPS)
        self._rows: deque[dict[str, Any]] = deque(maxlen=_MOST_ROWS)

    def stepped(self, row: dict[str, Any], *, seconds: float, waited: float, tokens: int) -> None:
        """row: as it stands in metrics.jsonl. The rest is of this rank alone."""
        self._recent.append((seconds, waited, tokens))
        self._rows.append(_short(row))
        self.step = row["step"] + 1
        self.loss = float("nan") if row["loss"] is None else row["loss"]  # Prometheus has no other word for none

    @property
    def wait_fraction(self) -> float:
        seconds, waited, _ = self._sums()
        return waited / seconds if seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        seconds, _, tokens = self._sums()
        return tokens / seconds if seconds else 0.0

    def take_rows(self) -> list[dict[str, Any]]:
        """The rows since the last call."""
        return [self._rows.popleft() for _ in range(len(self._rows))]

    def _sums(self) -> tuple[float, float, int]:
        recent = list(self._recent)
        return sum(r[0] for r in recent), sum(r[1] for r in recent), sum(r[2] for r in recent)


class Reporter:
    """Posts a report to the ledger every second, from a daemon thread; does nothing without a ledger (client=None).

    Rank 0 sends the new rows of metrics.jsonl along, and all of them (thinned) to a ledger that has forgotten them.
    """

    def __init__(self, client: LedgerClient | None, progress: Progress, world: World, session: str, run_dir: Path):
        self._client, self._progress, self._run_dir = client, progress, run_dir
        self._says_rows, self._instance, self._failing = world.rank == 0, "", False
        self._who = {
            "rank": world.rank,
            "world_size": world.size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "session": session,
        }
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)
        if client is not None:
            self._thread.start()

    def close(self, *, done: bool) -> None:
        """Sends a last report, and from rank 0 of a training that is done the word that producers may go."""
        if self._client is None:
            return
        self._closing.set()
        self._thread.join(_CLOSE_SECONDS)
        if done and self._says_rows:
            with suppress(StreamError):  # producers that do not hear of it are ended by whoever started them
                self._client.finish(patience=_CLOSE_SECONDS)
        self._client.close()

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(_REPORT_SECONDS)
            try:
                self._report()
                self._failing = False
            except Exception as error:
                if not self._failing and not closing:
                    log.warning("no report to the ledger: %s", str(error).partition("\n")[0])
                self._failing = True

    def _report(self) -> None:
        known, rows = self._client.instance, []
        if self._says_rows:
            rows = self._progress.take_rows()
            if known != self._instance:
                rows = self._all_rows()
                self._instance = known
        self._client.report(
            {
                **self._who,
                "step": self._progress.step,
                "total_steps": self._progress.total_steps,
                "wait_fraction": self._progress.wait_fraction,
                "rows": rows,
            }
        )

    def _all_rows(self) -> list[dict[str, Any]]:
        rows = read_metrics(self._run_dir)
        every = -(-len(rows) // _MOST_ROWS) or 1
        return [_short(row) for row in rows[(len(rows) - 1) % every :: every]]


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """What the status page draws. JSON has no word for what is not finite."""
    return {key: row[key] if row[key] is not None and math.isfinite(row[key]) else None for key in _ROW}


class RankMetrics(Collector):
    """counts: `Source.counts`."""

    def __init__(self, progress: Progress, counts: Counter[str], rank: int):
        self._progress, self._counts, self._rank = progress, counts, str(rank)

    def collect(self) -> Iterator[Metric]:
        for name, text in {
            "step": "Optimizer steps that are done",
            "total_steps": "Optimizer steps of the whole run",
            "loss": "Loss of the last step, over all ranks",
            "tokens_per_second": "Tokens that this rank trained on, a second, over the last steps",
            "wait_fraction": "Share of the time of the last steps that this rank waited for data",
        }.items():
            gauge = GaugeMetricFamily(f"draftsmith_rank_{name}", text, labels=["rank"])
            gauge.add_metric([self._rank], getattr(self._progress, name))
            yield gauge
        for name, text in {
            "packs": "Packs whose features this rank has got",
            "bytes": "Bytes of features that this rank has fetched from the store",
            "lost": "Objects that were missing or corrupt and had to be produced again",
            "wanted_again": "Packs wanted again from a ledger that had forgotten them",
            "quarantined": "Packs that no attempt could produce and that this rank did without",
        }.items():
            counter = CounterMetricFamily(f"draftsmith_rank_{name}", text, labels=["rank"])
            counter.add_metric([self._rank], self._counts[name])
            yield counter


def serve_metrics(metrics: RankMetrics, host: str, port: int) -> None:
    """`http://host:port/metrics`, from a daemon thread; together with what Prometheus knows of any process."""
    registry = CollectorRegistry()
    registry.register(metrics)
    ProcessCollector(registry=registry)
    try:
        start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise UserError(
            f"a rank's metrics cannot be served on {host}:{port}: {error.strerror}",
            fix="choose another cluster.trainer_metrics_port (rank r takes that + r), or 0 for none",
        ) from error
