"""The network is cut between two parties, and healed: the stream goes on, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from data_pipelines.engines import TargetConfig
from data_pipelines.stores.config import StoreConfig
from data_pipelines.stores.mooncake import library_path, master_command
from data_pipelines.stream.messages import producer_config
from data_pipelines.stream.sources import ColocatedSource
from tests.machines import Machine, two_machines

from .cable import Cable
from .conftest import TOKEN, LedgerProcess, wait_until
from .lone_rank import PACKS, digest
from .stand import ROOT, Stand, Worker

pytestmark = pytest.mark.faults

MIB = 1024**2
LEASE_SECONDS = 3.0


@pytest.fixture(scope="module")
def stand(tmp_path_factory, master, spec, engine) -> Iterator[Stand]:
    store = StoreConfig("mooncake", master=master.address, segment_bytes=64 * MIB, buffer_bytes=16 * MIB)
    ledger = LedgerProcess(tmp_path_factory.mktemp("network"), store, spec, lease_seconds=LEASE_SECONDS, max_attempts=9)
    made = Stand(ledger, store, spec, engine, master)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def far(stand) -> Iterator[Cable]:
    """What the producer `far` reaches the ledger by; there is also `one`, beside the ledger."""
    laid = Cable(stand.ledger.url)
    stand.start("one")
    stand.start("far", delay=0.1, url=laid.url)
    for name in ("one", "far"):
        stand.wait_for(name)
    yield laid
    laid.close()


@pytest.mark.parametrize("reset", [True, False], ids=["reset", "silent"])
def test_a_producer_that_is_cut_off_from_the_ledger_comes_back(stand, far, packs, reset):
    """The other producer does its work meanwhile. Either cut outlasts a lease, a silent one a call's time-out too."""
    worker = stand.workers["far"]
    said = len(worker.said())

    def cut() -> None:
        wait_until(lambda: stand.works("far"), 30)
        far.cut(reset=reset)
        began = time.monotonic()
        wait_until(lambda: "calling again" in worker.said()[said:], 30)
        time.sleep(max(0.0, LEASE_SECONDS + 1 - (time.monotonic() - began)))
        before = _stored_by(stand, "far")
        far.heal()
        wait_until(lambda: _stored_by(stand, "far") > before, 60)

    stand.read_during(packs[:PACKS], cut)


@pytest.mark.parametrize("reset", [True, False], ids=["reset", "silent"])
def test_a_rank_that_is_cut_off_from_the_ledger_goes_on_when_it_is_back(stand, far, packs, reset):
    """For longer than a lease, and when it is not told of the cut, than a call's time-out."""
    instance = []
    cable = Cable(stand.ledger.url)

    def cut() -> None:
        consumed = stand.total("consumed")
        wait_until(lambda: stand.total("consumed") > consumed, 30)
        instance.append(stand.status()["instance"])
        cable.cut(reset=reset)
        halted = stand.total("consumed")
        time.sleep(LEASE_SECONDS + 1 if reset else 10.5)
        assert stand.total("consumed") <= halted + 1, "the cable is cut: only a call under way can have arrived"
        cable.heal()

    try:
        stand.read_during(packs[:PACKS], cut, url=cable.url)
    finally:
        cable.close()
    assert stand.status()["instance"] == instance[0]


def _stored_by(stand: Stand, name: str) -> int:
    return sum(p["stored"] for p in stand.status()["producers"] if p["name"].startswith(f"{name}-"))


# Two machines


@contextmanager
def _process(command: list[str], log: Path, **options) -> Iterator[subprocess.Popen]:
    with log.open("a") as out:
        process = subprocess.Popen(command, **{"stdout": out, "stderr": out, "cwd": ROOT, "text": True, **options})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def _near_side(near: Machine, folder: Path, spec) -> Iterator[tuple[str, StoreConfig]]:
    """Master and ledger on one machine: (the ledger's address, the store)."""
    store = StoreConfig(
        "mooncake",
        master=f"{near.address}:50051",
        segment_bytes=64 * MIB,
        buffer_bytes=16 * MIB,
        transfer_timeout_seconds=3,
    )
    config = producer_config(TargetConfig(kind="tiny"), store, spec, threads=1, lease_seconds=LEASE_SECONDS)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "token").write_text(TOKEN)
    libraries = ":".join(filter(None, [library_path(), os.environ.get("LD_LIBRARY_PATH")]))
    master = near.inside(*master_command(near.address, 50051, 50052))
    ledger = near.inside(sys.executable, "-m", "data_pipelines.stream.server", "--host", near.address)
    ledger += ["--port", "8700", "--config", str(folder / "config.json")]
    ledger += ["--token-file", str(folder / "token"), "--address-file", str(folder / "address")]
    ledger += ["--lease-seconds", str(LEASE_SECONDS), "--max-attempts", "9"]
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
    with _process(master, folder / "master.log", env=environment), _process(ledger, folder / "ledger.log") as process:
        wait_until((folder / "address").exists, 60, lambda: process.poll() is None)
        yield (folder / "address").read_text(), store


class _Folder:
    """What a Worker needs to know of its ledger."""

    def __init__(self, folder: Path):
        self.folder, self.token_file, self.ca_file = folder, str(folder / "token"), ""


def test_a_cable_between_two_machines_is_pulled_and_put_back(tmp_path, spec, engine, packs):
    """A producer on one machine; store, ledger and rank on the other. Cut in the middle of everything, for longer than
    a lease, a call's time-out and the store's patience with its client."""
    reference = ColocatedSource(engine, spec)
    expected = [digest(reference.get(0, pack)) for pack in packs[:PACKS]]
    with two_machines(tmp_path) as (near, far, link), _near_side(near, tmp_path, spec) as (url, store):
        producer = Worker(url, _Folder(tmp_path), "far", delay=0.05, prefix=tuple(far.inside()))
        (tmp_path / "rank.json").write_text(json.dumps({"store": asdict(store), "spec": asdict(spec)}))
        output = tmp_path / "rank.out"
        command = near.inside(sys.executable, "-m", "tests.data_pipelines.stream.lone_rank")
        command += ["--ledger", url, "--config", str(tmp_path / "rank.json")]

        def lines() -> list[str]:
            return output.read_text().splitlines() if output.exists() else []

        with output.open("w") as out:
            with _process(command, tmp_path / "rank.log", stdin=subprocess.PIPE, stdout=out) as rank:
                wait_until(lambda: len(lines()) > 10, 90, lambda: rank.poll() is None)
                link.cut()
                time.sleep(11)
                halted = len(lines())
                time.sleep(1)
                assert len(lines()) == halted, "the link is cut: nothing can arrive"
                link.heal()
                wait_until(lambda: len(lines()) > halted + 10, 90, lambda: rank.poll() is None)
                rank.stdin.close()
                assert rank.wait(120) == 0, (tmp_path / "rank.log").read_text()[-2000:]
        assert producer.alive()
    got = [line.split() for line in lines()]
    assert [int(index) for index, _ in got] == list(range(len(got)))
    assert [found for _, found in got] == [expected[i % PACKS] for i in range(len(got))]
