"""Which children hang: they are alive and do nothing (stopped, frozen, deadlocked). They are ended, and then started
again like any that died.

The servers are asked; of ranks and producers the ledger knows when they last called. A thread of its own asks, so that
the launcher never waits for somebody who does not answer. What must not be taken for hanging: a process that was never
heard of is still loading, as long as it uses the processor at all; while the ledger is away nobody can be heard of; and
when this thread itself did not run (the machine slept), nobody did.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from data_pipelines.stream import StreamError
from data_pipelines.stream.client import LedgerClient
from data_pipelines.stream.messages import read_token
from trainer.config import RunConfig

from .processes import Child, Crew, cpu_seconds, descendants, end_hung

log = logging.getLogger(__name__)

_ANSWER_SECONDS = 5.0
_CPU_OF_LIFE = 0.1  # seconds of processor time; loading takes more, waiting in vain takes none


@contextmanager
def watching(crew: Crew, config: RunConfig, ports: dict[str, int]) -> Iterator[None]:
    """Ends hanging children of `crew` while the block runs. Nothing is watched for cluster.hang_seconds=0 or without a
    stream, where nobody can be asked."""
    if not config.cluster.hang_seconds or "ledger" not in ports:
        yield
        return
    ledger = LedgerClient(config.source.ledger, read_token(config.source.token_file), ca_file=config.source.ca_file)
    master = f"http://{config.cluster.host}:{ports['metrics']}/health" if "metrics" in ports else ""
    watch = Watch(crew, config, lambda: _ask_ledger(ledger), lambda: _ask_master(master))
    stop = threading.Event()
    thread = threading.Thread(target=watch.run, args=(stop,), name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(2.0)  # an answer that does not come is not waited for; `stop` is looked at before anybody is ended
        ledger.close()


@dataclass(frozen=True)
class Heard:
    """When somebody last called the ledger: not before `surely`, not after `perhaps` (our question took its time)."""

    surely: float
    perhaps: float
    pid: int = 0


class Watch:
    """ask_ledger: its numbers (`Ledger.snapshot`), None if it does not answer. ask_master: whether it answers.

    cpu: processor time that processes have used, in seconds.
    """

    def __init__(
        self,
        crew: Crew,
        config: RunConfig,
        ask_ledger: Callable[[], dict[str, Any] | None],
        ask_master: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[list[int]], float] = cpu_seconds,
    ):
        self._crew, self._ask_ledger, self._ask_master = crew, ask_ledger, ask_master
        self._clock, self._cpu, self._world_size = clock, cpu, config.cluster.ranks
        self._patience = config.cluster.hang_seconds
        self._producer_patience = self._patience + config.source.lease_seconds  # it says nothing while it computes
        self._heard: dict[str, Heard] = {}  # "producer-0", "rank 3", "ledger", …
        self._loading: dict[int, tuple[float, float]] = {}  # process id → when its cpu time last grew, and to what
        self._ledger = ""
        self._awake_since = self._ears_since = clock()

    def run(self, stop: threading.Event) -> None:
        interval, before = min(1.0, self._patience / 5), self._clock()
        while not stop.wait(interval):
            if self._clock() - before > interval + self._patience / 2:
                self._awake_since = self._clock()
            try:
                for child, process, why in self.look():
                    if not stop.is_set():
                        end_hung(child, process, why)
            except Exception:  # the run goes on without this look
                log.exception("the watch for hanging processes failed")
            before = self._clock()

    def look(self) -> list[tuple[Child, subprocess.Popen, str]]:
        """Ask everybody once. Returns who has been silent for too long: the child, its process, what to say of it."""
        lives = [(child, child.process) for child in self._crew.children]
        asked = self._clock()
        snapshot = self._ask_ledger()
        answering = {"ledger": snapshot is not None, "mooncake": self._ask_master()}
        now = self._clock()
        for child, _ in lives:
            if answering.get(child.role.name):
                self._heard[child.role.name] = Heard(asked, now)
        self._listen(snapshot, asked, now)
        found = []
        for child, process in lives:
            why = self._silent(child, now) or self._stuck_while_loading(child, process, now)
            if why:
                found.append((child, process, why))
        return found

    def _silent(self, child: Child, now: float) -> str:
        patience, since = self._patience, self._awake_since
        if not child.role.server:
            since = max(since, self._ears_since)
            patience = self._patience if child is self._crew.trainer else self._producer_patience
        for name, heard in self._of(child).items():  # the others are loading
            silence = now - max(heard.perhaps, since)
            if silence > patience:
                return f"{name if child is self._crew.trainer else 'it'} was silent for {silence:.0f} s"
        return ""

    def _of(self, child: Child) -> dict[str, Heard]:
        """Who of a child's life was heard of: for the trainer its ranks, else the child itself."""
        is_trainer, name = child is self._crew.trainer, child.role.name
        found = {n: h for n, h in self._heard.items() if (n.startswith("rank ") if is_trainer else n == name)}
        return {n: heard for n, heard in found.items() if heard.surely > child.started}

    def _stuck_while_loading(self, child: Child, process: subprocess.Popen, now: float) -> str:
        """Of whoever has not been heard of yet: whether it no longer uses the processor.

        torchrun itself counts until it has started its ranks: afterwards it looks after them all the time. Producers and
        ranks that find no ledger wait for it. Of another machine's processor nothing is known: who loads there is given
        the time that it takes.
        """
        if child.role.elsewhere:
            return ""
        is_trainer, heard = child is self._crew.trainer, self._of(child)
        if len(heard) >= (self._world_size if is_trainer else 1):
            return ""
        family = [pid for pid, _ in descendants(process.pid)]
        begun = [one.pid for one in heard.values()]
        loading = [pid for pid in (family if is_trainer and family else [process.pid, *family]) if pid not in begun]
        used = self._cpu(loading)
        since, before = self._loading.get(process.pid, (now, float("-inf")))
        if abs(used - before) >= _CPU_OF_LIFE:
            self._loading[process.pid] = (now, used)
            return ""
        idle = now - max(since, self._awake_since, 0.0 if child.role.server else self._ears_since)
        return f"it had not begun and did nothing for {idle:.0f} s" if idle > self._patience else ""

    def _listen(self, snapshot: dict[str, Any] | None, asked: float, now: float) -> None:
        """Note who called the ledger when. A ledger that is away, or new, has heard nobody."""
        instance = snapshot["instance"] if snapshot else ""
        if not instance or instance != self._ledger:
            self._ears_since, self._ledger = now, instance
        if snapshot is None:
            return
        speakers = [(f"rank {rank['rank']}", rank) for rank in snapshot["ranks"]]
        # A producer adds something of its own to the name that it was given, in each of its lives.
        speakers += [(producer["name"].rpartition("-")[0], producer) for producer in snapshot["producers"]]
        for name, caller in speakers:
            heard = Heard(asked - caller["seen"], now - caller["seen"], caller["pid"])
            self._heard[name] = max(heard, self._heard.get(name, heard), key=lambda one: one.surely)


def _ask_ledger(ledger: LedgerClient) -> dict[str, Any] | None:
    try:
        return ledger.status(patience=0.0)
    except StreamError:
        return None


def _ask_master(health: str) -> bool:
    if not health:
        return False
    try:
        return httpx.get(health, timeout=_ANSWER_SECONDS, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
