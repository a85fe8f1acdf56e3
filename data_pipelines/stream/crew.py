"""The producers that the ledger knows: when they called last, what they say of themselves, what they have done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .messages import About

_FORGET_SECONDS = 600.0


@dataclass
class Producer:
    seen: float
    about: About
    stored: int = 0
    failed: int = 0
    expired: int = 0
    bytes: int = 0


class Crew:
    """silent_seconds: without a call, before a producer is taken for gone, and its objects with it."""

    def __init__(self, clock: Callable[[], float], silent_seconds: float):
        self._clock, self._silent_seconds = clock, silent_seconds
        self._known: dict[str, Producer] = {}

    def __getitem__(self, name: str) -> Producer:
        return self._known[name]

    def see(self, name: str, about: About | None = None) -> Producer:
        """The producer has called."""
        known = self._known.setdefault(name, Producer(self._clock(), About()))
        known.seen, known.about = self._clock(), about or known.about
        return known

    def present(self, name: str) -> bool:
        known = self._known.get(name)
        return known is not None and self._clock() - known.seen < self._silent_seconds

    def lent(self) -> int:
        """Bytes of the store that those who are present lend."""
        return sum(known.about.capacity for name, known in self._known.items() if self.present(name))

    def leave(self) -> Iterator[str]:
        """Names of those who are not present. Those who have not been for ten minutes are forgotten."""
        for name in [name for name in self._known if not self.present(name)]:
            yield name
            if self._clock() - self._known[name].seen >= _FORGET_SECONDS:
                del self._known[name]

    def describe(self) -> list[dict[str, Any]]:
        now = self._clock()
        return [
            {
                "name": name,
                **known.about.model_dump(),
                "stored": known.stored,
                "failed": known.failed,
                "expired": known.expired,
                "bytes": known.bytes,
                "seen": now - known.seen,
            }
            for name, known in sorted(self._known.items())
        ]
