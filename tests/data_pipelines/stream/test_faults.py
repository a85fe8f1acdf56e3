"""What goes wrong with real processes and the real store, and what the rank sees of it: every pack, in order, bit for bit.

Each test is a row of the table in docs/stream.md.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator

import pytest

from data_pipelines.caches import user_cache
from data_pipelines.stores import Full, Store, StoreError, build_store
from data_pipelines.stores.config import StoreConfig

from ..conftest import Master
from .conftest import LedgerProcess, wait_until
from .rogue import CRIMES, Rogue
from .stand import Stand

MIB = 1024**2
LEASE_SECONDS = 3.0
TRANSFER_TIMEOUT_SECONDS = 3


@pytest.fixture(scope="module")
def store(module_master) -> StoreConfig:
    return StoreConfig(
        "mooncake",
        master=module_master.address,
        segment_bytes=64 * MIB,
        buffer_bytes=16 * MIB,
        transfer_timeout_seconds=TRANSFER_TIMEOUT_SECONDS,
    )


@pytest.fixture(scope="module")
def module_master(tmp_path_factory):
    """A master that these tests may freeze and kill."""
    started = Master(tmp_path_factory.mktemp("mooncake") / "master.log")
    yield started
    started.kill()


@pytest.fixture(scope="module")
def stand(tmp_path_factory, store, spec, engine, module_master) -> Iterator[Stand]:
    folder = tmp_path_factory.mktemp("faults")
    ledger = LedgerProcess(folder, store, spec, lease_seconds=LEASE_SECONDS, max_attempts=20)
    made = Stand(ledger, store, spec, engine, module_master)
    try:
        yield made
    finally:
        made.close()


# Producers


def test_a_slow_producer_beside_fast_ones_holds_up_nothing_but_its_own_packs(stand, packs):
    stand.have(slow=0.7, one=0)
    stand.read_during(packs, lambda: wait_until(lambda: _stored_by(stand, "slow") >= 3, 60))
    assert _stored_by(stand, "one") > _stored_by(stand, "slow") and stand.total("expired") == 0


def test_a_frozen_producer_loses_its_lease_and_its_late_answer_is_refused(stand, packs):
    stand.have(slow=0.7, one=0)
    slow = stand.workers["slow"]
    expired, refused = stand.total("expired"), stand.total("refused")

    def freeze_at_work() -> None:
        wait_until(lambda: stand.works("slow"), 30)
        slow.freeze()
        wait_until(lambda: stand.total("expired") > expired, 30)
        slow.thaw()
        wait_until(lambda: "its object is removed" in slow.said(), 30)

    stand.read_during(packs, freeze_at_work)
    assert stand.total("refused") > refused
    assert _stored_by(stand, "slow") > 0, "it works on"


def test_unread_objects_of_a_frozen_producer_are_made_again(stand, packs):
    """A read from its memory neither succeeds nor fails before the time-out of the transfer."""
    stand.have(slow=0.1)
    with stand.source() as source:
        source.get(0, packs[0])  # (a first contact with a frozen peer would take Mooncake 60 s)
        wanted = list(enumerate(packs, 1))
        source.want(wanted[:4])
        wait_until(lambda: stand.stored() == 4, 30)
        stand.workers["slow"].freeze()
        stand.start("one")
        assert stand.read(source, wanted) == len(packs)
    assert stand.total("lost") >= 4
    stand.workers["slow"].thaw()
    stand.nothing_is_left()
    stand.workers["one"].kill()
    del stand.workers["one"]
    stand.read_during(packs, lambda: None)  # and the thawed one is as good as ever


def test_unread_objects_of_a_killed_producer_are_made_again(stand, packs):
    stand.have(slow=0.1, one=0)
    stand.workers["one"].kill()
    lost = stand.total("lost")
    with stand.source() as source:
        source.want(list(enumerate(packs[:4])))
        wait_until(lambda: stand.stored() == 4, 30)
        stand.workers["slow"].kill()
        stand.start("one")
        assert stand.read(source, enumerate(packs)) == len(packs)
    assert stand.total("lost") >= lost + 4
    stand.nothing_is_left()


def test_a_producer_of_another_target_refuses_to_serve(stand, packs, tmp_path, monkeypatch):
    """The same architecture with one weight changed: the fingerprint is of the bytes."""
    stand.have(one=0)
    shutil.copytree(user_cache(), tmp_path / "draftsmith")
    for weights in tmp_path.rglob("*.safetensors"):
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)

    def start_other() -> None:
        with monkeypatch.context() as changed:
            changed.setenv("XDG_CACHE_HOME", str(tmp_path))
            other = stand.start("other")
        assert other.process.wait(60) != 0
        assert "has the fingerprint" in other.said() and "Traceback" not in other.said()

    stand.read_during(packs, start_other)
    assert not _producers(stand, "other")


# Ledger and store


def test_a_frozen_ledger_is_waited_for(stand, packs):
    """Longer than a call waits for its answer, and than a lease lasts."""
    stand.have(one=0, two=0)

    def freeze() -> None:
        stand.ledger.process.send_signal(signal.SIGSTOP)
        time.sleep(12)
        stand.ledger.process.send_signal(signal.SIGCONT)

    stand.read_during(packs, freeze)
    assert stand.workers["one"].alive() and stand.workers["two"].alive()


def test_a_killed_store_loses_its_objects_and_the_stream_goes_on(stand, packs, module_master):
    stand.have(one=0, two=0)
    lost = stand.total("lost")
    with stand.source() as source:
        source.want(list(enumerate(packs[:4])))
        wait_until(lambda: stand.stored() == 4, 30)
        module_master.kill()
        time.sleep(1)
        module_master.start()
        assert stand.read(source, enumerate(packs)) == len(packs)
    assert stand.total("lost") >= lost + 4
    stand.nothing_is_left()


def test_a_store_that_is_killed_in_the_middle_of_it_all(stand, packs, module_master):
    stand.have(one=0, two=0)

    def kill() -> None:
        time.sleep(0.5)
        module_master.kill()
        time.sleep(2)
        module_master.start()

    stand.read_during(packs, kill)
    assert all(_stored_by(stand, name) for name in ("one", "two"))


def test_a_frozen_store_is_waited_for(stand, packs, module_master):
    stand.have(one=0, two=0)

    def freeze() -> None:
        module_master.freeze()
        time.sleep(6)
        module_master.thaw()

    stand.read_during(packs, freeze)


def test_objects_that_vanish_are_made_again(stand, packs, module_master):
    """Removed behind everybody's back; some are removed while they are being read."""
    stand.have(one=0, two=0)
    lost = stand.total("lost")
    vandal = build_store(stand.store, role="consumer")
    try:
        with stand.source() as source:
            source.want(list(enumerate(packs[:4])))
            wait_until(lambda: stand.stored() == 4, 30)
            for key in module_master.objects():
                vandal.remove(key)
            assert stand.read(source, enumerate(packs)) == len(packs)
        assert stand.total("lost") == lost + 4

        def remove_for_a_while() -> None:
            for _ in range(40):
                for key in module_master.objects()[:1]:
                    vandal.remove(key)
                time.sleep(0.05)

        stand.read_during(packs, remove_for_a_while)
    finally:
        vandal.close()


def test_a_full_store_is_waited_for(stand, packs):
    """Somebody else has filled the producers' memory; what is in flight waits until there is room again."""
    stand.have(one=0)
    intruder = build_store(stand.store, role="consumer")
    keys: list[str] = []
    try:
        for size in (8 * MIB, MIB, MIB // 8, MIB // 64):
            _fill(intruder, size, keys)

        def make_room() -> None:
            wait_until(lambda: "trying again" in stand.workers["one"].said(), 30)
            for key in keys:
                intruder.remove(key)

        stand.read_during(packs, make_room)
    finally:
        intruder.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of bounded size needs root")
def test_a_full_disk_is_waited_for(tmp_path, spec, engine, packs):
    """A store of files on a file system that is full at first."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={MIB}", "tmpfs", folder], check=True)
    try:
        (folder / "ballast").write_bytes(bytes(MIB))
        store = StoreConfig("filesystem", path=str(folder))
        stand = Stand(
            LedgerProcess(tmp_path, store, spec, lease_seconds=LEASE_SECONDS, max_attempts=20), *(store, spec, engine)
        )
        try:
            stand.have(one=0)

            def make_room() -> None:
                wait_until(lambda: "trying again" in stand.workers["one"].said(), 30)
                assert "No space" in stand.workers["one"].said()
                (folder / "ballast").unlink()

            stand.read_during(packs, make_room)
            wait_until(lambda: not list(folder.iterdir()), 10)
        finally:
            stand.close()
    finally:
        subprocess.run(["umount", folder], check=True)


# A producer that cheats


@pytest.mark.parametrize("crime", sorted(CRIMES))
def test_a_rogue_producer_is_seen_through(stand, packs, crime):
    stand.have(one=0, two=0)
    before = stand.status()["totals"]
    client, lent = stand.ledger.client(), build_store(stand.store, role="producer")
    rogue = Rogue(f"rogue-{crime}", client, lent, stand.spec, stand.engine, crime)
    try:
        stand.read_during(packs, lambda: rogue.serve(3))
        assert rogue.committed == 3
        after = stand.status()["totals"]
        rejected = sum(after[name] - before[name] for name in ("lost", "failed", "expired", "refused"))
        if crime == "twice":
            assert rejected == 0
        elif crime == "somebody_elses_lease":
            assert after["refused"] - before["refused"] == 6 and after["lost"] == before["lost"]
        elif crime == "negative_size":  # a bad request: it keeps its lease, and is given the same pack again
            assert rejected >= 1
        else:
            assert rejected >= 3
    finally:
        client.close()
        lent.close()


def _fill(store: Store, size: int, keys: list[str]) -> None:
    """Put objects of `size` bytes until the store is full; their keys are added."""
    while True:
        keys.append(f"intruder-{uuid.uuid4().hex}")
        try:
            store.put(keys[-1], bytes(size))
        except Full:
            return
        except StoreError:  # memory of a producer that an earlier test killed: soon forgotten
            time.sleep(1)


def _producers(stand: Stand, name: str) -> list[dict]:
    return [p for p in stand.status()["producers"] if p["name"].startswith(f"{name}-")]


def _stored_by(stand: Stand, name: str) -> int:
    return sum(p["stored"] for p in _producers(stand, name))
