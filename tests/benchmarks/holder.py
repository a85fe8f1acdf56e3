"""The other side of the benchmarks that have no stream: sends bytes over a socket, or puts objects into the store.

python -m tests.benchmarks.holder tcp <bytes>             prints a port; answers every byte with so many bytes
python -m tests.benchmarks.holder put <bytes> <master>    puts an object under each key that it reads, and echoes it
"""

from __future__ import annotations

import socket
import sys

import numpy as np

from data_pipelines.stores import build_store
from data_pipelines.stores.config import StoreConfig


def tcp(size: int) -> None:
    payload = memoryview(np.random.default_rng(0).bytes(size))
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
        with connection:
            while connection.recv(1):
                connection.sendall(payload)


def put(size: int, master: str) -> None:
    payload = np.random.default_rng(0).bytes(size)
    store = build_store(StoreConfig("mooncake", master=master), role="producer")
    print("ready", flush=True)
    for line in sys.stdin:
        store.put(line.strip(), payload)
        print(line, end="", flush=True)
    store.close()


if __name__ == "__main__":
    kind, size, *rest = sys.argv[1:]
    {"tcp": tcp, "put": put}[kind](int(size), *rest)
