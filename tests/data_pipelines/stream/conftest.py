"""A stream of real processes: ledger, producers, and what a trainer rank needs to talk to them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from data_pipelines.engines import Engine, TargetConfig, build_engine
from data_pipelines.features import Features, FeatureSpec
from data_pipelines.packing import Document, Pack, pack_id
from data_pipelines.stores import build_store
from data_pipelines.stores.config import StoreConfig
from data_pipelines.stream.client import LedgerClient
from data_pipelines.stream.ledger import Ledger
from data_pipelines.stream.messages import producer_config
from data_pipelines.stream.producer import Producer
from data_pipelines.stream.server import LedgerServer
from data_pipelines.stream.sources import StreamSource
from tests.data_pipelines.serving import Served

TOKEN = "a-token-of-this-test"


class Clock:
    """For a ledger without real time: the test moves it."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def spec(tiny_target) -> FeatureSpec:
    config = tiny_target.config
    layers = config.num_hidden_layers
    return FeatureSpec(tiny_target.fingerprint, (1, layers - 1), config.hidden_size, dtype="float32")


class OneAtATime:
    """The target, for a producer thread and a test in one process (an engine belongs to one thread)."""

    def __init__(self, engine: Engine):
        self._engine, self._lock = engine, threading.Lock()

    def compute(self, input_ids: np.ndarray, lengths: tuple[int, ...]) -> Features:
        with self._lock:
            return self._engine.compute(input_ids, lengths)


@pytest.fixture(scope="session")
def engine(tiny_target, spec) -> OneAtATime:
    return OneAtATime(build_engine(tiny_target, spec))


@pytest.fixture(scope="session")
def packs(tiny_target) -> list[Pack]:
    return make_packs(tiny_target.config.vocab_size)


def make_packs(vocab_size: int) -> list[Pack]:
    """30 packs of one to three documents; the last is a copy of the first."""
    rng = np.random.default_rng(1)
    made = []
    for number in range(29):
        documents = []
        for part in range(1 + number % 3):
            ids = rng.integers(0, vocab_size, rng.integers(20, 60), dtype=np.int32)
            documents.append(Document(ids, np.ones(len(ids), dtype=bool), origin=f"rows.jsonl:{number}.{part}"))
        made.append(Pack(tuple(documents)))
    return [*made, made[0]]


class Reachable:
    """What both kinds of ledger below have: an address, and a file with its token."""

    url: str
    token_file: str
    ca_file = ""

    def client(self, patience: float = 30.0) -> LedgerClient:
        return LedgerClient(self.url, TOKEN, patience=patience, ca_file=self.ca_file)

    def status(self) -> dict:
        client = self.client()
        try:
            return client.status()
        finally:
            client.close()


class LedgerThread(Reachable):
    """A ledger behind a real socket, served by a thread of this process because that starts in no time."""

    def __init__(self, folder: Path, *, lease_seconds=60.0, max_attempts=3, window_bytes=0, port=0):
        (folder / "token").write_text(TOKEN)
        self.token_file = str(folder / "token")
        ledger = Ledger(
            lease_seconds=lease_seconds,
            max_attempts=max_attempts,
            clock=time.monotonic,
            window_bytes=window_bytes,
        )
        self._served = Served(LedgerServer(ledger, TOKEN, {}).app, port)
        self.port, self.url = self._served.port, self._served.address
        self.stop = self._served.stop


class LedgerProcess(Reachable):
    """A ledger that can be killed and started again on its port. tls: (certificate, key), PEM files.

    versions: of the packages that it asks its producers for, where they are not those installed here.
    """

    def __init__(
        self,
        folder: Path,
        store: StoreConfig,
        spec: FeatureSpec,
        *,
        lease_seconds=60.0,
        max_attempts=3,
        window_bytes=0,
        tls: tuple[Path, Path] | None = None,
        versions: dict[str, str] | None = None,
    ):
        target = TargetConfig(kind="tiny")
        config = producer_config(target, store, spec, threads=1, lease_seconds=lease_seconds)
        config["versions"].update(versions or {})
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "token").write_text(TOKEN + "\n")
        self.folder, self.token_file = folder, str(folder / "token")
        self._options = ["--lease-seconds", str(lease_seconds), "--max-attempts", str(max_attempts)]
        self._options += ["--window-bytes", str(window_bytes)]
        if tls:
            self.ca_file = str(tls[0])
            self._options += ["--tls-cert", str(tls[0]), "--tls-key", str(tls[1])]
        self._port = 0
        self.start()

    def start(self) -> None:
        address = self.folder / "address"
        address.unlink(missing_ok=True)
        command = [sys.executable, "-m", "data_pipelines.stream.server", "--config", str(self.folder / "config.json")]
        command += ["--token-file", self.token_file, "--port", str(self._port), "--address-file", str(address)]
        with (self.folder / "ledger.log").open("a") as log:
            self.process = subprocess.Popen([*command, *self._options], stdout=log, stderr=log)
        wait_until(address.exists, 30, lambda: self.process.poll() is None)
        self.url = address.read_text()
        self._port = int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class ProducerProcess:
    def __init__(self, ledger: LedgerProcess, name: str, *options: str):
        command = [sys.executable, "-m", "data_pipelines.stream.producer", "--ledger", ledger.url]
        command += ["--token-file", ledger.token_file, "--name", name, "--ca-file", ledger.ca_file, *options]
        self.log = ledger.folder / f"{name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def producer_thread(ledger: Reachable, store: StoreConfig, spec: FeatureSpec, engine) -> Iterator[Producer]:
    """The producer's loop in this process, to give it an engine that fails or a store that can be looked into."""
    client = ledger.client()
    opened = build_store(store, role="producer")
    producer = Producer("thread", client, opened, spec, engine, client.config()["instance"])
    thread = threading.Thread(target=producer.serve, daemon=True)
    thread.start()
    try:
        yield producer
    finally:
        client.finish()  # ends its long poll
        thread.join(30)
        opened.close()
        client.close()
        assert not thread.is_alive()


@contextmanager
def stream_source(
    ledger: Reachable, store: StoreConfig, spec: FeatureSpec, patience=60.0, session="this-session", quarantine=None
) -> Iterator[StreamSource]:
    source = StreamSource(
        ledger.client(patience),
        build_store(store, role="consumer"),
        spec,
        session=session,
        patience_seconds=patience,
        quarantine=quarantine,
    )
    try:
        yield source
    finally:
        source.close()


def wait_until(condition, seconds: float, alive=lambda: True) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert alive(), "the process has ended"
        assert time.monotonic() < deadline, f"not after {seconds} s"
        time.sleep(0.02)


def identity(pack: Pack, spec: FeatureSpec) -> str:
    return pack_id(pack.input_ids, pack.lengths, spec.fingerprint)


@pytest.fixture
def start_ledger(tmp_path):
    """start_ledger(lease_seconds=…, max_attempts=…, window_bytes=…) → a ledger, stopped after the test."""
    made: list[LedgerThread] = []

    def start(**options) -> LedgerThread:
        made.append(LedgerThread(tmp_path, **options))
        return made[-1]

    yield start
    for ledger in made:
        ledger.stop()
