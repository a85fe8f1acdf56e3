"""How a trainer rank gets the features of the packs that it wants."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UserError, check_choice


@dataclass
class SourceConfig:
    """name: stream (producers compute on demand), hybrid (stream, with a bounded cache of files for later epochs),
    offline (a filled cache of files), colocated (the target runs in the trainer's process).

    prefetch: packs that each rank keeps wanted ahead of the one that it trains on; with the number of ranks this is the
    window in packs, `window_bytes` the one in bytes: what is computed and not yet consumed never takes more.
    ledger and token_file: set by the launcher, or by hand.
    """

    name: str = "colocated"
    prefetch: int = 4
    window_bytes: int = 0  # 0: nine tenths of the memory that the producers lend to the store
    ledger: str = ""  # http://host:port, or https:// with cluster.tls_cert
    token_file: str = ""
    ca_file: str = ""  # PEM file of who signed the ledger's certificate, or of a self-signed certificate itself
    cache_dir: str = ""  # offline, hybrid: the folder of feature files; empty: <run_dir>/features
    cache_bytes: int = 20 * 1024**3  # hybrid: the most that the cache may hold
    lease_seconds: float = 60.0  # a producer that has not answered by then has lost its lease
    max_attempts: int = 3  # of one pack; what then happens to it:
    on_poison: str = "stop"  # stop (and name it), or quarantine (train without it)
    max_quarantined: int = 10  # packs, before the run stops after all
    patience_seconds: float = 300.0  # without any progress of the stream, before the run stops

    @property
    def streams(self) -> bool:
        """Whether there are a ledger and producers."""
        return self.name in ("stream", "hybrid")

    def __post_init__(self) -> None:
        check_choice("source.name", self.name, ("stream", "hybrid", "offline", "colocated"))
        check_choice("source.on_poison", self.on_poison, ("stop", "quarantine"))
        for key, least in {"prefetch": 1, "max_attempts": 1, "window_bytes": 0, "max_quarantined": 0}.items():
            if getattr(self, key) < least:
                raise UserError(f"source.{key}={getattr(self, key)}; it must be at least {least}")
        for key in ("lease_seconds", "patience_seconds"):
            if not getattr(self, key) > 0:
                raise UserError(f"source.{key}={getattr(self, key)}; it must be more than 0")
