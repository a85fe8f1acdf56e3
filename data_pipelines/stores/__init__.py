"""Stores: where the features of a pack are between the producer that computed them and the rank that trains on them.

All stores keep byte strings under keys. A key names one object for ever: it is made of a pack id and a lease id and is
never used twice, because Mooncake ignores a put on an existing key (it reports success and keeps the old bytes).
Exactly one consumer owns an object; it removes it after its own get has returned.
"""

from __future__ import annotations

from typing import Literal, Protocol

from .config import StoreConfig


class StoreError(Exception):
    """The store did not do what it was asked to do; the message gives its reason in words."""


class Missing(StoreError):
    """No object has this key: it was never put, was removed, or went away with the producer that held it."""


class Full(StoreError):
    """There is no room for the object now, or it is larger than any segment."""


class Store(Protocol):
    """A client of a store. One client may be used by several threads."""

    def put(self, key: str, payload: bytes | memoryview) -> None:
        """Keep `payload` under `key`, a key that was never used before. Raises Full or StoreError."""

    def get(self, key: str, size: int) -> bytes:
        """The `size` bytes of an object. Raises Missing, or StoreError (also when the object has another size).

        The bytes are as the store delivered them: only a checksum (`features.decode`) tells whether they are right.
        """

    def remove(self, key: str) -> None:
        """Remove an object; nothing happens when there is none. Raises StoreError."""

    def close(self) -> None:
        """Give everything back. Objects that a Mooncake producer still holds disappear with it. May be called twice."""


def build_store(config: StoreConfig, *, role: Literal["producer", "consumer"]) -> Store:
    """The store that `config` names. A producer lends memory to the pool (Mooncake), a consumer does not.

    Raises UserError when the store cannot be reached or its libraries are missing.
    """
    if config.name == "mooncake":
        from .mooncake import MooncakeStore

        return MooncakeStore(config, role=role)
    if config.name == "filesystem":
        from .filesystem import FilesystemStore

        return FilesystemStore(config.path)
    from .memory import MemoryStore

    return MemoryStore(config.path, capacity_bytes=config.segment_bytes)
