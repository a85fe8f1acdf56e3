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
from contextlib import contextmanager

import pytest

from data_pipelines.caches import user_cache
from data_pipelines.packing import Pack
from data_pipelines.stores import Full, Store, StoreError, build_store
from data_pipelines.stores.config import StoreConfig
from data_pipelines.stream.messages import MAX_WAIT_SECONDS
from data_pipelines.stream.sources import StreamSource

from ..conftest import Master
from .conftest import LedgerProcess, LedgerThread, producer_thread, wait_until
from .rogue import LEASES_LEFT_TO_END, REASONS, Rogue
from .stand import Stand

pytestmark = pytest.mark.faults

MIB = 1024**2
LEASE_SECONDS = 3.0
SLOW_SECONDS = 0.3
TRANSFER_TIMEOUT_SECONDS = 2


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


# Starting a producer takes seconds, hence the order: down to the kill `slow` and `one` are used, then `one` and `two`.


def test_a_slow_producer_beside_fast_ones_holds_up_nothing_but_its_own_packs(stand, packs):
    stand.have(slow=SLOW_SECONDS, one=0)
    stand.read_during(packs, lambda: wait_until(lambda: _stored_by(stand, "slow") >= 3, 60))
    assert _stored_by(stand, "one") > _stored_by(stand, "slow") and stand.total("expired") == 0


def test_a_frozen_producer_loses_its_lease_and_its_late_answer_is_refused(stand, packs):
    stand.have(slow=SLOW_SECONDS, one=0)
    slow = stand.workers["slow"]
    expired, refused, stored = stand.total("expired"), stand.total("refused"), _stored_by(stand, "slow")

    def freeze_at_work() -> None:
        wait_until(lambda: stand.works("slow"), 30)
        slow.freeze()
        wait_until(lambda: stand.total("expired") > expired, 30)
        slow.thaw()
        wait_until(lambda: stand.total("refused") > refused, 30)  # whether it was frozen in its forward or before it
        wait_until(lambda: _stored_by(stand, "slow") > stored, 30)  # it works on

    stand.read_during(packs, freeze_at_work)


def test_unread_objects_of_a_frozen_producer_are_made_again(stand, packs):
    """A read from its memory neither succeeds nor fails before the time-out of the transfer."""
    stand.have(slow=SLOW_SECONDS, one=0)
    lost = stand.total("lost")
    with stand.source() as source:
        _read_from(stand, source, packs, "slow")  # (a first contact with a frozen peer would take Mooncake 60 s)
        wanted = list(enumerate(packs, 100))
        with _only_slow_works(stand):
            source.want(wanted[:2])
            wait_until(lambda: stand.stored() == 2, 30)
            stand.workers["slow"].freeze()
        assert stand.read(source, wanted) == len(packs)
    assert stand.total("lost") >= lost + 2
    stored = _stored_by(stand, "slow")
    stand.workers["slow"].thaw()
    stand.nothing_is_left()
    stand.read_during(packs, lambda: wait_until(lambda: _stored_by(stand, "slow") > stored, 30))  # as good as ever


def test_unread_objects_of_a_killed_producer_are_made_again(stand, packs):
    stand.have(slow=SLOW_SECONDS, one=0)
    lost = stand.total("lost")
    with stand.source() as source:
        with _only_slow_works(stand):
            source.want(list(enumerate(packs[:4])))
            wait_until(lambda: stand.stored() == 4, 30)
            stand.workers["slow"].kill()
        assert stand.read(source, enumerate(packs)) == len(packs)
    assert stand.total("lost") >= lost + 4
    stand.nothing_is_left()


def test_a_producer_of_another_target_refuses_to_serve(stand, packs, tmp_path, monkeypatch):
    """The same architecture with one weight changed: the fingerprint is of the bytes."""
    shutil.copytree(user_cache(), tmp_path / "draftsmith")
    for weights in tmp_path.rglob("*.safetensors"):
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    with monkeypatch.context() as changed:
        changed.setenv("XDG_CACHE_HOME", str(tmp_path))
        other = stand.start("other")
    stand.start("two")  # at the same time, for the tests that follow
    stand.read_during(packs, lambda: other.process.wait(60))
    assert other.process.returncode != 0
    assert "has the fingerprint" in other.said() and "Traceback" not in other.said()
    assert not _producers(stand, "other")
    stand.wait_for("two")


# Ledger and store


def test_a_frozen_ledger_is_waited_for(stand, packs):
    """Longer than a call waits for its answer, and than a lease lasts."""
    stand.have(one=0, two=0)

    def freeze() -> None:
        stand.ledger.process.send_signal(signal.SIGSTOP)
        time.sleep(10.5)
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
        time.sleep(0.2)
        module_master.kill()
        time.sleep(1)
        module_master.start()

    stand.read_during(packs, kill)
    assert all(_stored_by(stand, name) for name in ("one", "two"))


def test_a_frozen_store_is_waited_for(stand, packs, module_master):
    stand.have(one=0, two=0)

    def freeze() -> None:
        module_master.freeze()
        time.sleep(2 * TRANSFER_TIMEOUT_SECONDS)
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
    stand.have(one=0, two=0)
    intruder = build_store(stand.store, role="consumer")
    keys: list[str] = []
    try:
        for size in (8 * MIB, MIB, MIB // 8, MIB // 64):
            _fill(intruder, size, keys)

        said = {worker: len(worker.said()) for worker in stand.workers.values()}

        def make_room() -> None:
            wait_until(lambda: any("trying again" in w.said()[s:] for w, s in said.items()), 30)
            for key in keys:
                intruder.remove(key)

        stand.read_during(packs, make_room)
    finally:
        intruder.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of bounded size needs root")
def test_a_full_disk_is_waited_for(tmp_path, spec, engine, packs, caplog):
    """A store of files on a file system that is full at first."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={MIB}", "tmpfs", folder], check=True)
    ledger = LedgerThread(tmp_path, lease_seconds=LEASE_SECONDS, max_attempts=20)
    try:
        (folder / "ballast").write_bytes(bytes(MIB))
        store = StoreConfig("filesystem", path=str(folder))
        stand = Stand(ledger, store, spec, engine)

        def make_room() -> None:
            wait_until(lambda: "trying again" in caplog.text, 30)
            assert "No space" in caplog.text
            (folder / "ballast").unlink()

        with producer_thread(ledger, store, spec, engine):
            stand.read_during(packs, make_room)
            wait_until(lambda: not list(folder.iterdir()), 10)
    finally:
        ledger.stop()
        subprocess.run(["umount", folder], check=True)


# A producer that cheats


def test_a_rogue_producer_is_seen_through(stand, packs):
    """One crime after the other while the rank reads; for each the ledger has the reason for which it came to nothing."""
    stand.have(one=0, two=0)
    client, lent = stand.ledger.client(), build_store(stand.store, role="producer")

    def commit_all() -> None:
        for crime, reason in REASONS.items():
            name, before = f"rogue-{crime}", stand.status()["totals"]
            rogue = Rogue(name, client, lent, stand.spec, stand.engine, crime)
            times = 1 if crime in LEASES_LEFT_TO_END else 2
            rogue.serve(times)
            assert rogue.committed == times, crime
            if reason:
                others = _reasons(stand, name, reason, times)
                if crime == "two_answers":  # the second one may come when the rank has already refused the first
                    others = [text for text in others if "answered too late" not in text]
                assert not others, f"{crime}: {others}"
            else:  # until all that it has made is read
                wait_until(lambda: stand.total("consumed") >= before["consumed"] + 10, 30)  # noqa: B023
            grown = {what: count - before[what] for what, count in stand.status()["totals"].items()}
            rejected = {what: grown[what] for what in ("lost", "failed", "expired", "refused")}
            if crime == "twice":
                assert not any(rejected.values()), f"{crime}: {rejected}"
            elif crime == "somebody_elses_lease":
                assert rejected == {"lost": 0, "failed": 0, "expired": 0, "refused": 2 * times}, f"{crime}: {rejected}"
            else:
                assert sum(rejected.values()) >= times, f"{crime}: {rejected}"

    try:
        stand.read_during(packs, commit_all)
    finally:
        client.close()
        lent.close()


def _reasons(stand: Stand, name: str, reason: str, times: int) -> list[str]:
    """Waits until the ledger has recorded `reason` against a producer so many times; returns what else it has."""
    found: list[str] = []

    def recorded() -> bool:
        errors = [f"{error['who']}: {error['message']}" for error in stand.status()["errors"]]
        found[:] = [error for error in errors if f"{name}:" in error or f"{name} " in error]
        return sum(reason in text for text in found) >= times

    try:
        wait_until(recorded, 30)
    except AssertionError:
        raise AssertionError(f"{name} has not been seen through: {found}") from None
    return [text for text in found if reason not in text]


@contextmanager
def _only_slow_works(stand: Stand) -> Iterator[None]:
    """The other producer is frozen for a while, its long poll has ended by then."""
    stand.workers["one"].freeze()
    try:
        time.sleep(MAX_WAIT_SECONDS + 0.2)
        yield
    finally:
        stand.workers["one"].thaw()


def _read_from(stand: Stand, source: StreamSource, packs: list[Pack], name: str) -> None:
    """Read packs until one of them has come from this producer."""
    before = _stored_by(stand, name)
    for index, pack in enumerate(packs):
        source.want([(index, pack), (index + 50, pack)])
        source.get(index, pack)
        source.get(index + 50, pack)
        if _stored_by(stand, name) > before:
            return
    raise AssertionError(f"{name} has stored nothing")


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
