"""The stream with everything real: mooncake_master, a ledger process, two producer processes, a rank in this one.

The tests share the processes and run in this order, from mild to violent.
"""

from __future__ import annotations

import signal
import time

import pytest
import torch

from data_pipelines.stores.config import StoreConfig
from data_pipelines.stream.consumer import Prefetcher
from data_pipelines.stream.sources import ColocatedSource

from .conftest import LedgerProcess, ProducerProcess, stream_source, wait_until

MIB = 1024**2


@pytest.fixture(scope="module")
def store(master) -> StoreConfig:
    return StoreConfig("mooncake", master=master.address, segment_bytes=64 * MIB, buffer_bytes=16 * MIB)


@pytest.fixture(scope="module")
def stream(tmp_path_factory, store, spec):
    """(the ledger, its two producers by name)"""
    ledger = LedgerProcess(tmp_path_factory.mktemp("stream"), store, spec, lease_seconds=3, max_attempts=5)
    producers = {name: ProducerProcess(ledger, name) for name in ("one", "two")}
    try:
        wait_until(lambda: len(ledger.status()["producers"]) == 2, 120)
        yield ledger, producers
    finally:
        for process in [*producers.values(), ledger]:
            process.kill()


def assert_stream_gives(stream, store, spec, engine, packs, *, between=lambda index: None) -> Prefetcher:
    """Every pack arrives, in order, bit for bit as the target in this process computes it."""
    ledger, _ = stream
    reference = ColocatedSource(engine, spec)
    with stream_source(ledger, store, spec) as source:
        prefetcher = Prefetcher(source, enumerate(packs), depth=4)
        try:
            seen = []
            for index, pack, features in prefetcher:
                expected = reference.get(index, pack)
                assert torch.equal(features.taps, expected.taps) and torch.equal(features.final, expected.final)
                seen.append((index, pack))
                between(index)
        finally:
            prefetcher.close()
    assert seen == list(enumerate(packs))
    return prefetcher


def objects_are_gone(master) -> bool:
    return not master.objects()


def test_all_packs_arrive_bit_for_bit_from_two_producers(stream, store, spec, engine, packs, master):
    prefetcher = assert_stream_gives(stream, store, spec, engine, packs)
    status = stream[0].status()
    assert status["totals"]["consumed"] == status["totals"]["stored"] == len(packs)
    assert all(count == 0 for count in status["packs"].values())
    assert sum(p["stored"] for p in status["producers"]) == len(packs)
    assert all(p["stored"] for p in status["producers"]), "both work"
    assert objects_are_gone(master)
    assert 0 < prefetcher.wait_seconds < 60


def test_a_later_epoch_wants_the_same_packs_again(stream, store, spec, engine, packs):
    assert_stream_gives(stream, store, spec, engine, packs[5:0:-1])


def test_a_killed_ledger_comes_back_and_the_stream_goes_on(stream, store, spec, engine, packs, master):
    ledger, _ = stream
    before = ledger.status()["instance"]

    def kill(index: int) -> None:
        if index == 6:
            ledger.kill()
            time.sleep(1)
            ledger.start()

    assert_stream_gives(stream, store, spec, engine, packs, between=kill)
    assert ledger.status()["instance"] != before
    wait_until(lambda: objects_are_gone(master), 10)  # the producers remove what the old ledger knew of


def test_a_killed_producer_costs_nothing_but_time(stream, store, spec, engine, packs, master):
    """Its lease and its unread objects are somebody else's work then."""
    ledger, producers = stream

    def kill(index: int) -> None:
        if index == 4:
            producers["one"].kill()

    assert_stream_gives(stream, store, spec, engine, packs, between=kill)
    assert ledger.status()["totals"]["consumed"] >= len(packs)
    wait_until(lambda: objects_are_gone(master), 20)


def test_sigterm_ends_producer_and_ledger_cleanly(stream):
    ledger, producers = stream
    producers["two"].process.send_signal(signal.SIGTERM)
    assert producers["two"].process.wait(20) == 0
    ledger.process.send_signal(signal.SIGTERM)
    assert ledger.process.wait(20) == 0
