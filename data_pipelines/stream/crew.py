"""The producers that the ledger knows: when they called last, what they say of themselves, what they have done."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
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
    dismissed: bool = False


class Crew:
    """silent_seconds: without a call, before a producer is taken for gone, and its objects with it."""

    def __init__(self, clock: Callable[[], float], silent_seconds: float):
        self._clock, self._silent_seconds = clock, silent_seconds
        # Whoever has called last is last. (The beginning of a plain dict is slow to find when keys move to its end.)
        self._known: OrderedDict[str, Producer] = OrderedDict()
        self._here: OrderedDict[str, Producer] = OrderedDict()  # of these, who has not left
        self._lent = 0

    def __getitem__(self, name: str) -> Producer:
        return self._known[name]

    def see(self, name: str, about: About | None = None) -> Producer:
        """The producer has called."""
        known = self._known.pop(name, None) or Producer(self._clock(), About())
        if self._here.pop(name, None):
            self._lent -= known.about.capacity
        known.seen, known.about = self._clock(), about or known.about
        self._known[name] = self._here[name] = known
        self._lent += known.about.capacity
        return known

    def dismiss(self, yes: bool = True) -> None:
        """Those who are known, not those who come later: they may have come for the next training."""
        for known in self._known.values():
            known.dismissed = yes

    def dismissed(self, name: str) -> bool:
        known = self._known.get(name)
        return known is not None and known.dismissed

    def present(self, name: str) -> bool:
        known = self._known.get(name)
        return known is not None and self._clock() - known.seen < self._silent_seconds

    def lent(self) -> int:
        """Bytes of the store that those lend who have not left."""
        return self._lent

    def leave(self) -> list[str]:
        """Names of those who have been silent for too long, once each. After ten minutes they are forgotten."""
        now = self._clock()
        gone = list(takewhile(lambda name: now - self._here[name].seen >= self._silent_seconds, self._here))
        for name in gone:
            self._lent -= self._here.pop(name).about.capacity
        patience = max(_FORGET_SECONDS, self._silent_seconds)
        for name in list(takewhile(lambda name: now - self._known[name].seen >= patience, self._known)):
            del self._known[name]
        return gone

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
