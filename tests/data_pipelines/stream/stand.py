"""A stream of real processes that can be tormented while a rank reads from it, and what has to be true all the while."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from data_pipelines.features import Features
from data_pipelines.packing import Pack
from data_pipelines.stream.consumer import Prefetcher
from data_pipelines.stream.sources import ColocatedSource, StreamSource

from .conftest import LedgerProcess, identity, stream_source, wait_until

ROOT = Path(__file__).parents[3]


class Worker:
    """A producer process; `delay` makes it slow. It may be stopped, continued and killed."""

    def __init__(self, url: str, ledger: LedgerProcess, name: str, *, delay: float = 0.0, prefix: tuple[str, ...] = ()):
        module = ["data_pipelines.stream.producer"]
        if delay:
            module = ["tests.data_pipelines.stream.slow_producer", "--delay", str(delay)]
        command = [*prefix, sys.executable, "-m", *module, "--ledger", url, "--token-file", ledger.token_file]
        self.name, self.delay = name, delay
        self._log = ledger.folder / f"{name}.log"
        self._log.touch()
        self._start = self._log.stat().st_size
        with self._log.open("a") as log:
            self.process = subprocess.Popen([*command, "--name", name], stdout=log, stderr=log, cwd=ROOT)

    def said(self) -> str:
        """What this process has logged."""
        return self._log.read_bytes()[self._start :].decode()

    def alive(self) -> bool:
        return self.process.poll() is None

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Stand:
    """A ledger process, producers by name, and the features that the target in this process gives.

    master: for its list of objects; None with another store.
    """

    def __init__(self, ledger: LedgerProcess, store, spec, engine, master=None):
        self.ledger, self.store, self.spec, self.engine, self.master = ledger, store, spec, engine, master
        self.workers: dict[str, Worker] = {}
        self._reference = ColocatedSource(engine, spec)
        self._expected: dict[str, Features] = {}

    def have(self, **delays: float) -> None:
        """Exactly these producers: the others are killed, the missing ones started."""
        for name, worker in list(self.workers.items()):
            if not worker.alive() or delays.get(name) != worker.delay:
                worker.kill()
                del self.workers[name]
        started = [name for name in delays if name not in self.workers]
        for name in started:
            self.start(name, delay=delays[name])
        for name in started:
            self.wait_for(name)

    def start(self, name: str, *, delay: float = 0.0, url: str = "", prefix: tuple[str, ...] = ()) -> Worker:
        worker = Worker(url or self.ledger.url, self.ledger, name, delay=delay, prefix=prefix)
        self.workers[name] = worker
        return worker

    def wait_for(self, name: str) -> None:
        """Until a producer serves."""
        worker = self.workers[name]
        wait_until(lambda: "serves" in worker.said(), 120, worker.alive)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()
        self.ledger.kill()

    # What has to be true

    def read(self, source: StreamSource, items: Iterable[tuple[int, Pack]]) -> int:
        """Every pack arrives, in order, bit for bit. Returns how many there were."""
        wanted, asked = [], iter(items)
        # The prefetcher takes the items one by one, when it has room for them.
        prefetcher = Prefetcher(source, (wanted.append(item) or item for item in asked), depth=4)
        count = 0
        try:
            for index, pack, features in prefetcher:
                expected = self._expect(index, pack)
                assert (index, pack) == wanted[count]
                assert torch.equal(features.taps, expected.taps) and torch.equal(features.final, expected.final)
                count += 1
            assert count == len(wanted)
        finally:
            prefetcher.close()
        return count

    def read_during(self, packs: list[Pack], trouble: Callable[[], None], *, url: str = "") -> int:
        """Round after round of the packs arrives bit for bit while `trouble` goes on in a thread, and one round after.

        Nothing may be left then in the store and in the ledger. url: another way to the ledger.
        """
        failures: list[BaseException] = []

        def run() -> None:
            try:
                trouble()
            except BaseException as error:
                failures.append(error)

        def rounds() -> Iterator[tuple[int, Pack]]:
            number = 0
            while not last_round.is_set():
                if not thread.is_alive():
                    last_round.set()
                for pack in packs:
                    yield number, pack
                    number += 1

        thread, last_round = threading.Thread(target=run, daemon=True), threading.Event()
        with self.source(url) as source:
            thread.start()
            count = self.read(source, rounds())
        if failures:
            raise failures[0]
        self.nothing_is_left()
        return count

    @contextmanager
    def source(self, url: str = "") -> Iterator[StreamSource]:
        address, self.ledger.url = self.ledger.url, url or self.ledger.url
        try:
            with stream_source(self.ledger, self.store, self.spec, session=uuid.uuid4().hex) as source:
                self.ledger.url = address
                yield source
        finally:
            self.ledger.url = address

    def nothing_is_left(self) -> None:
        wait_until(lambda: not any(self.status()["packs"].values()), 30)
        if self.master is not None:
            try:
                wait_until(lambda: not self.master.objects(), 30)
            except AssertionError:
                raise AssertionError(f"left in the store: {self.master.objects()}") from None

    def status(self) -> dict:
        return self.ledger.status()

    def total(self, name: str) -> int:
        return self.status()["totals"][name]

    def works(self, name: str) -> bool:
        """Whether a producer holds a lease."""
        return any(p["name"].startswith(f"{name}-") and p["works_on"] is not None for p in self.status()["producers"])

    def stored(self) -> int:
        """Objects in the store that nobody has read."""
        return self.status()["packs"]["stored"]

    def _expect(self, index: int, pack: Pack) -> Features:
        name = identity(pack, self.spec)
        if name not in self._expected:
            self._expected[name] = self._reference.get(index, pack)
        return self._expected[name]
