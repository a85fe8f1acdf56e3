"""Who waits for what in a long poll, so that news wakes those whom it concerns and nobody else.

With thousands of callers that wait, waking all of them at every change would cost the ledger's loop far more than the
changes themselves.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict


class Polls:
    """Callers that sleep, by the names of what they wait for; of one event loop."""

    def __init__(self):
        self._sleepers: dict[str, OrderedDict[asyncio.Future[None], None]] = {}  # in the order in which they came

    async def sleep(self, names: tuple[str, ...], seconds: float) -> bool:
        """Until one of the names is woken: True. False after `seconds`."""
        sleeper = asyncio.get_running_loop().create_future()
        for name in names:
            self._sleepers.setdefault(name, OrderedDict())[sleeper] = None
        try:
            await asyncio.wait_for(sleeper, seconds)
        except TimeoutError:
            return False
        finally:
            for name in names:
                others = self._sleepers[name]
                del others[sleeper]
                if not others:
                    del self._sleepers[name]
        return True

    def wake(self, name: str) -> None:
        """All who wait for `name`."""
        for sleeper in self._sleepers.get(name, ()):
            if not sleeper.done():
                sleeper.set_result(None)

    def wake_one(self, name: str) -> None:
        """Whoever has waited longest. Whoever was woken so, and leaves something for others, calls it again."""
        for sleeper in self._sleepers.get(name, ()):
            if not sleeper.done():
                sleeper.set_result(None)
                return

    def wake_all(self) -> None:
        for name in self._sleepers:
            self.wake(name)
