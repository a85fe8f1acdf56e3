"""How a trainer rank gets the features of the packs that it wants."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UserError


@dataclass
class SourceConfig:
    """name: stream (producers compute on demand), hybrid (stream, with a bounded cache of files for later epochs),
    offline (a filled cache of files), colocated (the target runs in the trainer's process).

    prefetch: packs that each rank keeps wanted ahead of the one that it trains on; with the number of ranks this is the
    window, hence the backpressure. ledger and token_file: set by the launcher, or by hand.
    """

    name: str = "colocated"
    prefetch: int = 4
    ledger: str = ""  # http://host:port
    token_file: str = ""
    cache_dir: str = ""  # offline, hybrid: the folder of feature files; empty: <run_dir>/features
    cache_bytes: int = 20 * 1024**3  # hybrid: the most that the cache may hold
    lease_seconds: float = 60.0  # a producer that has not answered by then has lost its lease
    max_attempts: int = 3  # of one pack, before the run stops and names it
    patience_seconds: float = 300.0  # without any progress of the stream, before the run stops

    def __post_init__(self) -> None:
        if self.name not in ("stream", "hybrid", "offline", "colocated"):
            raise UserError(f"source.name={self.name} is not one of stream, hybrid, offline, colocated")
        if self.prefetch < 1:
            raise UserError(f"source.prefetch={self.prefetch}; it must be at least 1")
