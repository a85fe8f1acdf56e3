"""The packs that are wanted and not leased, in the order in which producers get them."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


class Ready(Generic[T]):
    """Lowest index first, for each kind of features. What has ceased to be ready is noticed when its turn comes.

    is_ready: whether an item that was added still is; adding it again when it is ready again is up to the caller.
    """

    def __init__(self, is_ready: Callable[[T], bool]):
        self._is_ready, self._added = is_ready, count()
        self._heaps: dict[str, list[tuple[int, int, T]]] = {}

    def add(self, features: str, index: int, item: T) -> None:
        heapq.heappush(self._heaps.setdefault(features, []), (index, next(self._added), item))

    def first(self, features: str) -> T | None:
        """It stays where it is, until it is not ready any more."""
        heap = self._heaps.get(features, [])
        while heap and not self._is_ready(heap[0][2]):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def kinds(self) -> list[str]:
        """Of all features that were ever asked for in this session."""
        return list(self._heaps)

    def clear(self) -> None:
        self._heaps.clear()
