"""What Prometheus is told: by the ledger at /metrics, by each producer at a port of its own if it is given one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..errors import UserError

# Names of the snapshot's fields → (kind, name and meaning of the metric).
_PRODUCERS = {
    "seen": (GaugeMetricFamily, "seen_seconds", "Since its last call"),
    "lease_age": (GaugeMetricFamily, "lease_age_seconds", "Since it leased what it works on"),
    "capacity": (GaugeMetricFamily, "lent_bytes", "Memory lent to the store"),
    "stored": (CounterMetricFamily, "stored", "Packs stored"),
    "bytes": (CounterMetricFamily, "stored_bytes", "Bytes stored"),
    "failed": (CounterMetricFamily, "failed", "Packs that it could not produce"),
    "expired": (CounterMetricFamily, "expired", "Leases that ended before it answered"),
    "compute_seconds": (CounterMetricFamily, "compute_seconds", "Time in the target"),
    "put_seconds": (CounterMetricFamily, "put_seconds", "Time in the store"),
    "idle_seconds": (CounterMetricFamily, "idle_seconds", "Time waiting for a lease"),
}
_RANKS = {
    "seen": (GaugeMetricFamily, "seen_seconds", "Since its last report"),
    "step": (GaugeMetricFamily, "step", "Optimizer steps done"),
    "total_steps": (GaugeMetricFamily, "total_steps", "Optimizer steps of the run"),
    "wait_fraction": (GaugeMetricFamily, "wait_fraction", "Share of its time that it waits for data"),
}


class LedgerCollector(Collector):
    """`snapshot`: of the ledger, taken when the metrics are asked for."""

    def __init__(self, snapshot: Callable[[], dict[str, Any]]):
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        status = self._snapshot()
        packs = GaugeMetricFamily("draftsmith_ledger_packs", "Packs in the window, by state", labels=["state"])
        for state, count in status["packs"].items():
            packs.add_metric([state], count)
        yield packs
        yield GaugeMetricFamily(
            "draftsmith_ledger_stored_bytes", "Bytes in the store that are not consumed yet", status["bytes_stored"]
        )
        for name, size in status["window"].items():
            yield GaugeMetricFamily(f"draftsmith_ledger_window_{name}_bytes", f"The window in bytes: {name}", size)
        for name, rate in status["rates"].items():
            yield GaugeMetricFamily(f"draftsmith_ledger_{name}", "Consumed, over the last 30 seconds", rate)
        for name, total in {**status["totals"], "quarantined": status["quarantined"]}.items():
            yield CounterMetricFamily(f"draftsmith_ledger_{name}", f"Since the ledger started: {name}", total)
        yield from _by("producer", "name", _PRODUCERS, status["producers"])
        yield from _by("rank", "rank", _RANKS, status["ranks"])


class ProducerCollector(Collector):
    """`numbers`: those of `_PRODUCERS` that a producer knows of itself."""

    def __init__(self, name: str, numbers: Callable[[], dict[str, float]]):
        self._name, self._numbers = name, numbers

    def collect(self) -> Iterator[Metric]:
        yield from _by("producer", "name", _PRODUCERS, [{"name": self._name, **self._numbers()}])


def serve_metrics(collector: Collector, host: str, port: int) -> Callable[[], None]:
    """Serve them at http://host:port/metrics from a thread; returns what ends it. Raises UserError."""
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise UserError(
            f"the metrics cannot be served: {error.strerror}",
            where=f"{host}:{port}",
            fix="choose another --metrics-port (cluster.producer_metrics_port), or 0 for none",
        ) from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


def _by(label: str, key: str, metrics: dict[str, Any], items: list[dict[str, Any]]) -> Iterator[Metric]:
    for field, (kind, name, meaning) in metrics.items():
        family = kind(f"draftsmith_{label}_{name}", meaning, labels=[label])
        for item in items:
            if item.get(field) is not None:
                family.add_metric([str(item[key])], item[field])
        yield family
