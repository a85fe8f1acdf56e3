"""What a simulation is told, and what it tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from data_pipelines.errors import UserError
from data_pipelines.stream.messages import MAX_WAIT_SECONDS

from .parts import Spread

# Seconds of the ledger's loop for a call, on one core of a busy AMD EPYC server; see docs/scale.md.
LEDGER = {"want": 0.16e-3, "lease": 0.14e-3, "locate": 0.10e-3, "lost": 0.12e-3, "failed": 0.12e-3}
LEDGER |= {"stored": 0.13e-3, "consumed": 0.10e-3, "reconcile": 0.3e-3}
CALLS = tuple(LEDGER)


@dataclass(frozen=True)
class Costs:
    """Seconds of service, as measured (`tests.benchmarks.ledger_rate`, `tests.benchmarks.scale_runs`).

    ledger: CPU of the ledger's loop per call, by its name. ledger_token: of the same, per token of a want or a lease.
    wake: of a long poll that is looked at again. caller: of a rank or producer for one call, its way to the ledger and back
    excepted. master: of the store's master per request (it has `master_workers`). put, get, remove: of the client beside the
    transfer. put_byte: encoding and copying; get_byte: copying and verifying.
    """

    ledger: Mapping[str, float] = field(default_factory=lambda: dict(LEDGER))
    ledger_token: float = 26e-9
    wake: float = 0.05e-3
    caller: float = 0.6e-3
    master: float = 25e-6
    master_workers: int = 4
    put: float = 0.3e-3
    get: float = 0.3e-3
    remove: float = 0.1e-3
    put_byte: float = 0.5e-9
    get_byte: float = 0.5e-9


@dataclass(frozen=True)
class Scenario:
    """A run. Bytes, seconds, bytes per second.

    compute: of a producer for one pack, the transfer excepted. step: of a rank for one pack (forward and backward).
    sync: of a step, for all ranks together (reductions, optimizer). checkpoint: for which a save holds all ranks up.
    producer_nic: of `producers_per_nic` producers together; rank_nic: likewise. latency: one way. window_bytes: 0 for no
    bound.
    producer_mtbf: of one producer, rank_mtbf: of one rank; 0: none dies. kills: (second, producer) of deaths beside these.
    ledgers: as many shards, each with its share of ranks, producers and window. poll_seconds: after which a caller that
    waits asks again. producer_restart, trainer_restart: until they serve again. flow_rate: of one transfer, whatever the
    links would let through. stop_after: steps that are simulated, of a run that is longer; 0: all.
    """

    ranks: int
    producers: int
    steps: int
    packs_per_rank: int
    tokens: int
    pack_bytes: int
    compute: Spread
    step: Spread
    sync: float = 0.0
    prefetch: int = 4
    window_bytes: int = 0
    lease_seconds: float = 60.0
    max_attempts: int = 3
    checkpoint_every: int = 0
    checkpoint: float = 0.0
    producer_nic: float = 50e9
    producers_per_nic: int = 1
    rank_nic: float = 50e9
    ranks_per_nic: int = 1
    flow_rate: float = 1e12
    latency: float = 20e-6
    producer_mtbf: float = 0.0
    producer_restart: float = 60.0
    rank_mtbf: float = 0.0
    trainer_restart: float = 120.0
    kills: tuple[tuple[float, int], ...] = ()
    ledgers: int = 1
    poll_seconds: float = MAX_WAIT_SECONDS
    stop_after: int = 0
    max_seconds: float = 1e6  # of simulated time, for a run that would not end
    seed: int = 0
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        for name in ("ranks", "producers", "steps", "packs_per_rank", "tokens", "pack_bytes", "prefetch", "ledgers"):
            if getattr(self, name) < 1:
                raise UserError(f"simulation: {name}={getattr(self, name)}; it must be at least 1")
        if self.ledgers > min(self.ranks, self.producers):
            raise UserError(f"simulation: {self.ledgers} ledgers for {self.ranks} ranks, {self.producers} producers")
        if self.window_bytes and self.window_bytes // self.ledgers < self.pack_bytes:
            raise UserError(
                f"simulation: a window of {self.window_bytes} bytes does not hold a pack of {self.pack_bytes}"
            )


@dataclass(frozen=True)
class Result:
    """steps: those that were done and not undone by a restart. Rates and fractions are of all the time since `skipped` steps
    were done first (the pipeline fills once), what restarts took and undid included.

    lost_fraction: of that time, in which no rank works on a step that stays: 1 − their own time / all. wait_fraction: of the
    ranks' time, for packs of their own, as `metrics.jsonl` has it; one late pack holds all ranks up, and only its own counts
    as waiting. idle_fraction: of the producers' time, waiting for a lease.
    ledger, master, rank_nic, producer_nic: the busiest one's share of its capacity. ledger_queue: mean seconds that a request
    waits for its turn. trained: packs of the final history, in order.
    """

    seconds: float
    steps: int
    steps_per_second: float
    tokens_per_second: float
    lost_fraction: float
    wait_fraction: float
    idle_fraction: float
    ledger: float
    ledger_queue: float
    requests_per_second: float
    master: float
    rank_nic: float
    producer_nic: float
    window: float
    packs_computed: int
    packs_lost: int
    packs_refused: int
    producers_died: int
    trainer_restarts: int
    trained: tuple[tuple[int, ...], ...]

    def numbers(self) -> dict[str, Any]:
        """Without the packs; JSON-ready."""
        return {name: value for name, value in asdict(self).items() if name != "trained"}
