"""Where the roles of a run live."""

from __future__ import annotations

from dataclasses import dataclass

from data_pipelines.errors import UserError


@dataclass
class ClusterConfig:
    """Read by the launcher; saved with the run."""

    name: str = "local"
    producers: int = 2
    ranks: int = 2
    threads: int = 1  # compute threads of each producer and rank; 0 leaves torch's own choice
    host: str = "127.0.0.1"
    ledger_port: int = 0  # 0: any free port
    store_port: int = 0
    metrics_port: int = 0  # of the store's master
    trainer_metrics_port: int = 0  # rank r serves Prometheus metrics on this + r; 0: no rank does
    producer_metrics_port: int = 0  # likewise producer i
    tls_cert: str = ""  # PEM files: the ledger then speaks https; callers check it against source.ca_file
    tls_key: str = ""
    max_restarts: int = 3  # of each role, before the run is given up; forgotten after ten healthy minutes
    hang_seconds: float = 60.0  # a process that was silent for as long is ended and started again; 0: wait for ever

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise UserError(
                "cluster.tls_cert and cluster.tls_key belong together", fix="give both, or neither for plain http"
            )
        if self.hang_seconds < 0:
            raise UserError(f"cluster.hang_seconds={self.hang_seconds}; it cannot be negative")
