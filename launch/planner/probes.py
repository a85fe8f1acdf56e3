"""What `draftsmith bench-node` measures of a machine's parts: arithmetic, memory, links, store, ledger, disk.

Rates are for each second. What one core does is measured in CPU time, which who else is on the machine changes
little; everything else on the clock, the best of a few tries.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from data_pipelines.features import Features, FeatureSpec, encode
from data_pipelines.stores import build_store
from data_pipelines.stores.config import StoreConfig
from data_pipelines.stores.mooncake import library_path, master_command, wait_ready
from data_pipelines.stream.client import LedgerClient
from data_pipelines.stream.wants import Want, pack_ids

from ..supervision.processes import free_port
from .hardware import BENCH_TOKENS

_HOST = "127.0.0.1"
SECONDS = 1.0  # of one measurement, about


def best(run: Callable[[], None], device: torch.device) -> float:
    """Seconds that `run` takes: the least of as many tries as fit into the time, at least two after one to warm up."""
    run()
    tries, began = [], time.monotonic()
    while len(tries) < 2 or time.monotonic() - began < SECONDS:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            run()
            torch.cuda.synchronize(device)
            tries.append(time.perf_counter() - start)
        else:
            start = time.process_time()
            run()
            tries.append(time.process_time() - start)
    return min(tries)


def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP: of square matrices, large enough for the device."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in "ab")
    return 2 * size**3 / best(lambda: torch.mm(a, b), device)


def memory_rate(device: torch.device) -> float:
    """Bytes that a copy reads and writes."""
    source = torch.ones((1 << 30) if device.type == "cuda" else (1 << 27), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / best(lambda: target.copy_(source), device)


def host_copy_rate(device: torch.device) -> float:
    """Bytes from the GPU into pinned memory of the host."""
    source = torch.ones(1 << 28, dtype=torch.uint8, device=device)
    target = torch.empty(source.shape, dtype=torch.uint8, pin_memory=True)
    return source.numel() / best(lambda: target.copy_(source, non_blocking=True), device)


def socket_rate() -> float:
    """Bytes from one thread to another over loopback TCP."""
    size, rounds = 1 << 26, 4
    payload = memoryview(bytes(size))
    buffer = memoryview(bytearray(size))
    with socket.create_server((_HOST, 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                for _ in range(rounds):
                    connection.sendall(payload)

        thread = threading.Thread(target=answer)
        thread.start()
        with socket.create_connection(server.getsockname()) as reader:
            times = []
            for _ in range(rounds):
                start, got = time.perf_counter(), 0
                while got < size:
                    got += reader.recv_into(buffer[got:])
                times.append(time.perf_counter() - start)
        thread.join()
    return size / min(times)


def disk_rate(folder: Path) -> float:
    """Bytes written and synced to the disk of `folder`."""
    payload, times = os.urandom(1 << 26), []
    for _ in range(2):
        with tempfile.TemporaryFile(dir=folder) as file:
            start = time.perf_counter()
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - start)
    return len(payload) / min(times)


def store_rates(size: int = 1 << 26, rounds: int = 4) -> tuple[float, float]:
    """Bytes that one process encodes and puts into Mooncake's store, and that another gets from it over loopback TCP. size:
    of a pack's features, about."""
    port, metrics = free_port(_HOST), free_port(_HOST)
    libraries = ":".join(filter(None, [library_path(), os.environ.get("LD_LIBRARY_PATH", "")]))
    with process(master_command(_HOST, port, metrics), {"LD_LIBRARY_PATH": libraries}) as master:
        wait_ready(_HOST, port, metrics, process=master)
        address = f"{_HOST}:{port}"
        with process([sys.executable, "-m", "launch.planner.probes", str(size), address], pipes=True) as holder:
            store = build_store(StoreConfig("mooncake", master=address), role="consumer")
            puts, gets = [], []
            for i in range(rounds):
                holder.stdin.write(f"{i}\n")
                holder.stdin.flush()
                seconds, stored = holder.stdout.readline().split()
                size = int(stored)
                puts.append(float(seconds))
                start = time.perf_counter()
                store.get(f"bench-{i}", size)
                gets.append(time.perf_counter() - start)
                store.remove(f"bench-{i}")
            store.close()
            holder.stdin.close()
            holder.wait(30)
    return size / min(puts), size / min(gets)


def ledger_rate(packs: int = 300, tokens: int = BENCH_TOKENS) -> float:
    """Requests that one ledger answers, by its CPU time: the five calls of a pack, one after another."""
    with tempfile.TemporaryDirectory(prefix="draftsmith-bench-") as folder:
        config, token, address = (Path(folder) / name for name in ("config.json", "token", "address"))
        config.write_text("{}")
        token.write_text(secrets.token_hex(16))
        token.chmod(0o600)
        server = [sys.executable, "-m", "data_pipelines.stream.server", "--config", str(config)]
        server += ["--token-file", str(token), "--address-file", str(address)]
        with process(server) as ledger:
            deadline = time.monotonic() + 60
            while not address.exists() and ledger.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            client = LedgerClient(address.read_text(), token.read_text())
            ids = pack_ids(np.arange(tokens))
            wants = [Want("bench", i, f"{i:032x}", "bench", 1000, ids, [tokens]) for i in range(packs)]
            _hand_through(client, wants[:20])
            before, start = _cpu_seconds(ledger.pid), time.monotonic()
            _hand_through(client, wants[20:])
            took = _cpu_seconds(ledger.pid) - before or time.monotonic() - start
            client.close()
    return 5 * (packs - 20) / took


def _hand_through(client: LedgerClient, wants: list[Want]) -> None:
    for want in wants:
        client.want([want])
        lease, _ = client.lease("bench", "bench", wait=1.0)
        client.stored("bench", lease.want, lease.lease, 900, "c")
        client.locate(want.id, wait=1.0)
        client.consumed(want.id, lease.lease)


def _cpu_seconds(pid: int) -> float:
    """Of a running process; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def process(
    command: list[str], env: dict[str, str] | None = None, *, pipes: bool = False
) -> Iterator[subprocess.Popen]:
    """Runs while the context lasts; what it says is dropped unless it is to be talked to."""
    talk = (
        {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True} if pipes else {"stdout": subprocess.DEVNULL}
    )
    given = {key: value for key, value in (env or {}).items() if value}
    running = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, **given}, **talk)
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(10)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def _hold(size: int, master: str) -> None:
    """The other process of `store_rates`: for each line that it reads it encodes and puts a pack, and writes the seconds and
    its bytes."""
    spec = FeatureSpec("bench", (0,), 256, "float32")
    ids = np.arange(size // (2 * 256 * 4))
    features = Features(torch.randn(len(ids), 1, 256), torch.randn(len(ids), 256))
    store = build_store(StoreConfig("mooncake", master=master), role="producer")
    for line in sys.stdin:
        start = time.perf_counter()
        payload = encode(features, pack=line.strip(), input_ids=ids, lengths=[len(ids)], spec=spec)
        store.put(f"bench-{line.strip()}", payload)
        print(time.perf_counter() - start, len(payload), flush=True)
    store.close()


if __name__ == "__main__":
    _hold(int(sys.argv[1]), sys.argv[2])
