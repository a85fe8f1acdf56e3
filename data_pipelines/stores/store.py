"""What a store is, what can go wrong with one, and which there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

from ..plugins import Registry


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


# name → build(StoreConfig, "producer" or "consumer")
STORES: Registry[Callable[[Any, Literal["producer", "consumer"]], Store]] = Registry("store")


@STORES.register("mooncake")
def _mooncake(config, role):
    from .mooncake import MooncakeStore

    return MooncakeStore(config, role=role)


@STORES.register("filesystem")
def _filesystem(config, role):
    from .filesystem import FilesystemStore

    return FilesystemStore(config.path)


@STORES.register("memory")
def _memory(config, role):
    from .memory import MemoryStore

    return MemoryStore(config.path, capacity_bytes=config.segment_bytes)
