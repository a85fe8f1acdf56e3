"""A producer that hangs: whoever reads from it is blocked for as long as the configuration says, not longer."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace

import pytest

from data_pipelines.stores import StoreError, build_store
from data_pipelines.stores.config import StoreConfig

MIB = 1024**2


def hold(config: StoreConfig, ready) -> None:
    store = build_store(config, role="producer")
    store.put("held", b"x" * MIB)
    ready.set()
    signal.pause()


def test_a_read_from_a_frozen_producer_ends_and_can_be_told_when(own_master):
    config = StoreConfig("mooncake", master=own_master.address, segment_bytes=16 * MIB, buffer_bytes=4 * MIB)
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    producer = spawn.Process(target=hold, args=(config, ready), daemon=True)
    producer.start()
    try:
        assert ready.wait(60)
        store = build_store(replace(config, transfer_timeout_seconds=1), role="consumer")
        assert os.environ["MC_TCP_STATUS_TIMEOUT_SEC"] == "1"
        assert store.get("held", MIB) == b"x" * MIB
        os.kill(producer.pid, signal.SIGSTOP)
        with pytest.raises(StoreError):
            store.get("held", MIB)
        store.close()
    finally:
        producer.kill()
        producer.join()
