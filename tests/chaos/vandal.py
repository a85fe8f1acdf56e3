"""`python -m tests.chaos.vandal <master> <url of its list of keys> <count>`: removes that many objects of a store.

A process of its own: one with an open client of Mooncake must not start others.
"""

from __future__ import annotations

import contextlib
import sys
import time

import httpx

from data_pipelines.stores import StoreError, build_store
from data_pipelines.stores.config import StoreConfig


def main(master: str, keys_url: str, count: int) -> None:
    store = build_store(StoreConfig("mooncake", master=master), role="consumer")
    removed, deadline = 0, time.monotonic() + 10
    while removed < count and time.monotonic() < deadline:
        for key in httpx.get(keys_url, trust_env=False).text.split()[: count - removed]:
            with contextlib.suppress(StoreError):
                store.remove(key)
                removed += 1
        time.sleep(0.01)
    store.close()
    print(removed)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
