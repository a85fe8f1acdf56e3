"""A store in the memory of one process, for a producer thread and a consumer that live together."""

from __future__ import annotations

import threading

from .store import Full, Missing, StoreError


class _Pool:
    """The objects of one name, shared by every MemoryStore of that name, with the number of those that are open."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, bytes] = {}
        self.users = 0


_pools: dict[str, _Pool] = {}
_pools_lock = threading.Lock()


class MemoryStore:
    """Stores of one name in one process see the same objects. The objects go when the last of these stores is closed.

    capacity_bytes: more than this raises Full, as a Mooncake segment would.
    """

    def __init__(self, name: str = "", *, capacity_bytes: int = 512 * 1024**2):
        self._name, self._capacity = name, capacity_bytes
        with _pools_lock:
            self._pool: _Pool | None = _pools.setdefault(name, _Pool())
            self._pool.users += 1

    def put(self, key: str, payload: bytes | memoryview) -> None:
        pool = self._open()
        with pool.lock:
            if key in pool.objects:
                raise StoreError(f"key {key} is in use; keys are never used twice")
            held = sum(map(len, pool.objects.values()))
            if held + len(payload) > self._capacity:
                raise Full(f"{len(payload)} bytes do not fit beside {held} of {self._capacity} bytes")
            pool.objects[key] = bytes(payload)

    def get(self, key: str, size: int) -> bytes:
        pool = self._open()
        with pool.lock:
            payload = pool.objects.get(key)
        if payload is None:
            raise Missing(f"no object {key}")
        if len(payload) != size:
            raise StoreError(f"object {key} has {len(payload)} bytes, not {size}")
        return payload

    def remove(self, key: str) -> None:
        pool = self._open()
        with pool.lock:
            pool.objects.pop(key, None)

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is None:
            return
        with _pools_lock:
            pool.users -= 1
            if not pool.users:
                _pools.pop(self._name, None)

    def _open(self) -> _Pool:
        if self._pool is None:
            raise StoreError("the store is closed")
        return self._pool
