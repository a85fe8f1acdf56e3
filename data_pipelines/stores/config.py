"""Where features live between the producer that computed them and the rank that trains on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError
from .store import STORES


@dataclass
class StoreConfig:
    """name: mooncake (RDMA or TCP between processes and machines), filesystem (a shared folder), memory (one
    process), or one that a plug-in registers.

    segment_bytes: memory that each producer lends to the pool. It bounds the features in flight together with the
    sources' prefetch. master: host:port of mooncake_master, set by the launcher.
    """

    name: str = "mooncake"
    master: str = ""
    protocol: str = "tcp"
    device: str = ""  # RDMA devices, such as mlx5_0
    segment_bytes: int = 512 * 1024**2
    buffer_bytes: int = 128 * 1024**2  # local transfer buffer of each client
    transfer_timeout_seconds: int = 30  # a get from a process that hangs fails after so long (Mooncake over TCP)
    path: str = ""  # filesystem: the shared folder
    options: dict[str, Any] = field(default_factory=dict)  # of a store of your own

    def __post_init__(self) -> None:
        STORES.choose(self.name)
        for key in ("segment_bytes", "buffer_bytes", "transfer_timeout_seconds"):
            if getattr(self, key) < 1:
                raise UserError(f"store.{key}={getattr(self, key)}; it must be at least 1")
