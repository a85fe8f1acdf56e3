"""Real processes: the byte window against the store's own account, TLS, versions, a producer's metrics."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch

from data_pipelines.errors import UserError
from data_pipelines.features import payload_bytes
from data_pipelines.stores.config import StoreConfig
from data_pipelines.stream.client import LedgerClient
from data_pipelines.stream.consumer import Prefetcher
from data_pipelines.stream.messages import versions
from data_pipelines.stream.sources import ColocatedSource

from ..conftest import Master, free_port
from .conftest import TOKEN, LedgerProcess, ProducerProcess, stream_source, wait_until

MIB = 1024**2


class Sampler:
    """The most bytes that the master has ever counted in its store, looked at all the time."""

    def __init__(self, master: Master):
        self.most, self.samples = 0, 0
        self._address = f"http://127.0.0.1:{master.metrics_port}/metrics"
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with httpx.Client(trust_env=False) as http:
            while not self._done.is_set():
                [used] = re.findall(r"^master_allocated_bytes (\d+)", http.get(self._address).text, re.MULTILINE)
                self.most, self.samples = max(self.most, int(used)), self.samples + 1
                time.sleep(0.002)

    def stop(self) -> None:
        self._done.set()
        self._thread.join()


def test_the_store_never_holds_more_than_the_window(own_master, tmp_path, spec, engine, packs):
    """A rank that reads slowly and wants everything at once; two producers that could fill the store."""
    largest = max(payload_bytes(spec, len(pack)) for pack in packs)
    window = 5 * largest
    store = StoreConfig("mooncake", master=own_master.address, segment_bytes=64 * MIB, buffer_bytes=16 * MIB)
    ledger = LedgerProcess(tmp_path, store, spec, window_bytes=window)
    producers = [ProducerProcess(ledger, name) for name in ("one", "two")]
    sampler = Sampler(own_master)
    try:
        with stream_source(ledger, store, spec) as source:
            source.want(list(enumerate(packs)))
            wait_until(lambda: ledger.status()["window"]["used"] > window - largest, 120)
            reference = ColocatedSource(engine, spec)
            for index, pack in enumerate(packs):
                features = source.get(index, pack)
                assert torch.equal(features.final, reference.get(index, pack).final)
                status = ledger.status()
                assert status["window"]["limit"] == window
                assert status["window"]["used"] + status["window"]["garbage"] <= window
                time.sleep(0.05)
    finally:
        sampler.stop()
        for process in [*producers, ledger]:
            process.kill()
    assert sampler.samples > 100
    assert window / 2 < sampler.most <= window


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "1",
    ]
    command += ["-keyout", str(key), "-out", str(cert), "-subj", "/CN=ledger", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def test_a_stream_over_tls(certificate, tmp_path, spec, engine, packs):
    store = StoreConfig("filesystem", path=str(tmp_path / "store"))
    ledger = LedgerProcess(tmp_path, store, spec, tls=certificate)
    producer = None
    try:
        assert ledger.url.startswith("https://")
        producer = ProducerProcess(ledger, "one")
        with stream_source(ledger, store, spec) as source:
            prefetcher = Prefetcher(source, enumerate(packs[:4]), depth=2)
            for index, pack, features in prefetcher:
                assert torch.equal(features.taps, ColocatedSource(engine, spec).get(index, pack).taps)
            prefetcher.close()
        stranger = LedgerClient(ledger.url, TOKEN, patience=60)
        with pytest.raises(UserError, match="certificate is not trusted"):
            stranger.status()
        stranger.close()
        careless = LedgerClient(ledger.url.replace("https:", "http:"), TOKEN, patience=0)
        with pytest.raises(UserError, match="not answered"):
            careless.status()
        careless.close()
    finally:
        for process in filter(None, (producer, ledger)):
            process.kill()


def test_a_producer_of_other_versions_refuses_and_says_what_to_install(tmp_path, spec):
    store = StoreConfig("filesystem", path=str(tmp_path / "store"))
    ledger = LedgerProcess(tmp_path, store, spec, versions={"transformers": "4.0.1"})
    try:
        producer = ProducerProcess(ledger, "other")
        assert producer.process.wait(60) != 0
        said = producer.log.read_text()
        assert f"transformers is {versions()['transformers']} here and 4.0.1 there" in said
        assert "install transformers==4.0.1" in said
        assert "Traceback" not in said
        assert ledger.status()["producers"] == []
    finally:
        ledger.kill()


def test_a_producer_serves_its_own_metrics(tmp_path, spec, packs):
    store = StoreConfig("filesystem", path=str(tmp_path / "store"))
    ledger, port = LedgerProcess(tmp_path, store, spec), free_port()
    producer = ProducerProcess(ledger, "one", "--metrics-port", str(port))
    try:
        with stream_source(ledger, store, spec) as source:
            source.get(0, packs[0])
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
        assert 'draftsmith_producer_stored_total{producer="one"} 1.0' in text
        [seconds] = re.findall(r'draftsmith_producer_compute_seconds_total{producer="one"} (\S+)', text)
        assert float(seconds) > 0
        wait_until(lambda: ledger.status()["producers"][0]["compute_seconds"] == float(seconds), 20)
        [shown] = ledger.status()["producers"]
        assert shown["pid"] == producer.process.pid and shown["idle_seconds"] > 0
    finally:
        producer.kill()
        ledger.kill()


def test_a_metrics_port_that_is_taken_is_the_persons_error(tmp_path, spec):
    store = StoreConfig("filesystem", path=str(tmp_path / "store"))
    ledger = LedgerProcess(tmp_path, store, spec)
    try:
        producer = ProducerProcess(ledger, "one", "--metrics-port", ledger.url.rpartition(":")[2])
        assert producer.process.wait(60) != 0
        assert "metrics cannot be served" in producer.log.read_text()
    finally:
        ledger.kill()
