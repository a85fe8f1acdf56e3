"""Clocks that jump: a day ahead and back, under every process of the stream. Only clocks that never jump are used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_pipelines.stores.config import StoreConfig

from ..conftest import Master
from .conftest import LedgerProcess, wait_until
from .stand import Stand

MIB = 1024**2
LEASE_SECONDS = 60.0  # a lease that ends is one that the jump has ended


@pytest.fixture
def clock(tmp_path, monkeypatch):
    """clock(seconds) sets the wall clock of all processes started from now on that far ahead of the true one."""
    library = _faketime()
    file = tmp_path / "clock"

    def jump(seconds: int) -> None:
        changed = file.with_suffix(".new")
        changed.write_text(f"{seconds:+d}\n")
        changed.replace(file)

    jump(0)
    monkeypatch.setenv("FAKETIME_TIMESTAMP_FILE", str(file))
    monkeypatch.setenv("FAKETIME_NO_CACHE", "1")
    monkeypatch.setenv("DONT_FAKE_MONOTONIC", "1")
    monkeypatch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
    monkeypatch.setenv("LD_PRELOAD", library)
    yield jump
    for left in Path("/dev/shm").glob("*faketime_*"):  # by processes that were killed
        if not Path("/proc", left.name.rpartition("_")[2]).exists():
            left.unlink(missing_ok=True)


def _faketime() -> str:
    if not shutil.which("faketime") and os.geteuid() == 0:
        subprocess.run(["apt-get", "install", "-y", "--no-install-recommends", "faketime"], capture_output=True)
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not found:
        pytest.skip("NOT TESTED: clocks that jump (the package faketime is not here and cannot be installed)")
    return str(found[0])


def test_a_clock_that_jumps_by_a_day_and_back_changes_nothing(clock, tmp_path, spec, engine, packs):
    master = Master(tmp_path / "master.log")
    store = StoreConfig("mooncake", master=master.address, segment_bytes=64 * MIB, buffer_bytes=16 * MIB)
    ledger = LedgerProcess(tmp_path, store, spec, lease_seconds=LEASE_SECONDS, max_attempts=1)
    stand = Stand(ledger, store, spec, engine, master)
    try:
        stand.have(one=0)
        _assert_jumps(clock)

        def jump() -> None:
            for seconds in (24 * 3600, 0, -24 * 3600, 0):
                clock(seconds)
                consumed = stand.total("consumed")
                wait_until(lambda: stand.total("consumed") > consumed + 5, 60)  # noqa: B023
                time.sleep(0.5)

        stand.read_during(packs[:10], jump)
        totals = stand.status()["totals"]
        assert totals["expired"] == totals["lost"] == totals["failed"] == totals["refused"] == 0
        assert totals["stored"] == totals["consumed"]
    finally:
        stand.close()
        master.kill()


def _assert_jumps(clock) -> None:
    """A process started as those of the stream were does see the jump on its wall clock, and only there."""
    code = "import time; print(time.time(), time.monotonic())"
    clock(24 * 3600)
    wall, monotonic = map(float, subprocess.check_output([sys.executable, "-c", code], text=True).split())
    clock(0)
    assert wall - time.time() > 23 * 3600 and abs(monotonic - time.monotonic()) < 600
