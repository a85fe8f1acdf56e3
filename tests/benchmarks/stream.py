"""What the stream costs beside what it is made of, measured in one run, in turns.

    python -m tests.benchmarks.stream [--rounds 5]

memcpy, plain TCP over loopback, the store alone and the whole stream (ledger, two producers with ready-made features,
the trainer's source and prefetcher) carry packs of the same size. Then each pass of the stream's own code over the bytes,
and who waits when the other side is slower. Prints markdown; nothing is judged, for times depend on who else is there.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import torch
import xxhash

from data_pipelines.engines import TargetConfig
from data_pipelines.features import FeatureSpec, check_values, decode, encode
from data_pipelines.packing import Document, Pack, pack_id
from data_pipelines.stores import build_store
from data_pipelines.stores.config import StoreConfig
from data_pipelines.stream.client import LedgerClient
from data_pipelines.stream.consumer import Prefetcher
from data_pipelines.stream.messages import producer_config
from data_pipelines.stream.sources import StreamSource

from .processes import Master, Processes, markdown
from .ready_made import ReadyMade

SPEC = FeatureSpec("ready-made", (2, 15, 27), 576)  # SmolLM2-135M's shape, three taps: 4.6 kB a token
SIZES = {"2.4 MB": (520, 60), "32 MB": (7000, 12)}  # tokens of a pack, packs in a round
DEPTH = 4  # packs ahead: of the prefetcher, and of the store alone
TOKEN = "a-token-of-this-benchmark"


def make_packs(tokens: int, count: int) -> list[Pack]:
    rng = np.random.default_rng(tokens)
    ids = [rng.integers(0, 49152, tokens, dtype=np.int32) for _ in range(count)]
    return [Pack((Document(i, np.ones(tokens, dtype=bool), origin=f"{n}"),)) for n, i in enumerate(ids)]


def encode_pack(pack: Pack) -> bytes:
    features = ReadyMade(SPEC, 0).compute(pack.input_ids, pack.lengths)
    identity = pack_id(pack.input_ids, pack.lengths, SPEC.fingerprint)
    return encode(features, pack=identity, input_ids=pack.input_ids, lengths=pack.lengths, spec=SPEC)


@contextmanager
def memcpy(payload: bytes, count: int) -> Iterator[Callable[[], int]]:
    source, target = np.frombuffer(payload, np.uint8), np.empty(len(payload), np.uint8)

    def carry() -> int:
        for _ in range(count):
            np.copyto(target, source)
        return count

    yield carry


@contextmanager
def plain_tcp(payload: bytes, count: int) -> Iterator[Callable[[], int]]:
    holder, said = _talk("tcp", str(len(payload)))
    buffer = memoryview(bytearray(len(payload)))
    with socket.create_connection(("127.0.0.1", int(said))) as connection:

        def carry() -> int:
            for _ in range(count):
                connection.sendall(b".")
                left = buffer
                while left:
                    left = left[connection.recv_into(left) :]
            return count

        yield carry
    holder.wait(10)


@contextmanager
def store_alone(payload: bytes, count: int, master: Master) -> Iterator[Callable[[], int]]:
    """Two processes put, this one gets and removes, as many ahead as the stream has."""
    holders = [_talk("put", str(len(payload)), master.address)[0] for _ in range(2)]
    store = build_store(StoreConfig("mooncake", master=master.address), role="consumer")

    def carry() -> int:
        keys = [secrets.token_hex(16) for _ in range(count)]

        def ask(i: int) -> None:
            if i < count:
                holders[i % 2].stdin.write(keys[i] + "\n")
                holders[i % 2].stdin.flush()

        for i in range(DEPTH):
            ask(i)
        for i, key in enumerate(keys):
            assert holders[i % 2].stdout.readline().strip() == key
            store.get(key, len(payload))
            store.remove(key)
            ask(i + DEPTH)
        return count

    yield carry
    for holder in holders:
        holder.stdin.close()
        holder.wait(30)
    store.close()


def _talk(*arguments: str) -> tuple[subprocess.Popen, str]:
    """A holder, and the first line that it says."""
    holder = subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.holder", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return holder, holder.stdout.readline()


class WholeStream:
    """Ledger and two producers in processes of their own; `carry` is what a rank does."""

    def __init__(self, folder: Path, processes: Processes, master: Master, *, producer_seconds: float = 0.0):
        folder.mkdir()
        store = StoreConfig("mooncake", master=master.address)
        config = producer_config(TargetConfig(kind="tiny"), store, SPEC, threads=1, lease_seconds=60)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "token").write_text(TOKEN)
        address, token = folder / "address", str(folder / "token")
        self.names = [f"{folder.name}-{role}" for role in ("ledger", "producer-a", "producer-b")]
        processes.python(
            self.names[0], "data_pipelines.stream.server", "--config", str(folder / "config.json"),
            "--token-file", token, "--address-file", str(address),
        )  # fmt: skip
        processes.wait_for(address.exists)
        for name in self.names[1:]:
            processes.python(
                name, "tests.benchmarks.ready_made", address.read_text(), token, name, str(producer_seconds)
            )
        self.client = LedgerClient(address.read_text(), TOKEN)
        processes.wait_for(lambda: len(self.client.status()["producers"]) == 2)
        self._processes, self._next = processes, 0
        self._source = StreamSource(
            LedgerClient(address.read_text(), TOKEN), build_store(store, role="consumer"), SPEC,
            session=secrets.token_hex(8), patience_seconds=60,
        )  # fmt: skip

    def carry(self, packs: list[Pack], *, step_seconds: float = 0.0) -> float:
        """Returns the part of the time that the loop has waited."""
        began, start = time.monotonic(), self._next
        self._next += len(packs)
        prefetcher = Prefetcher(self._source, enumerate(packs, start), DEPTH)
        for index, _, _ in prefetcher:
            if index == start:
                first = prefetcher.wait_seconds  # the pipeline fills; a run does this once
            time.sleep(step_seconds)
        return (prefetcher.wait_seconds - first) / (time.monotonic() - began - first)

    def end(self) -> None:
        self._source.close()
        self.client.finish()
        for name in self.names[1:]:
            self._processes.running.pop(name).wait(30)
        self._processes.running.pop(self.names[0]).terminate()
        self.client.close()

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far, by role."""
        roles = {name.rpartition("producer")[1] or "ledger": [] for name in self.names}
        for name in self.names:
            roles[name.rpartition("producer")[1] or "ledger"].append(self._processes.running[name])
        roles |= {"master": [self._processes.running["master"]], "consumer": [psutil.Process()]}
        return {role: sum(sum(p.cpu_times()[:2]) for p in found) for role, found in roles.items()}


def compare(name: str, rounds: int, folder: Path, processes: Processes, master: Master) -> None:
    """The table of one size of packs."""
    tokens, count = SIZES[name]
    packs = make_packs(tokens, count)
    payload = encode_pack(packs[0])
    stream = WholeStream(folder / name.replace(" ", ""), processes, master)
    speeds: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    ways = {"memcpy": memcpy(payload, count), "plain TCP": plain_tcp(payload, count)}
    ways["store alone"] = store_alone(payload, count, master)
    with ways["memcpy"] as copy, ways["plain TCP"] as tcp, ways["store alone"] as store:
        for turn in range(rounds + 1):  # the first warms everything up
            for way, carry in (("memcpy", copy), ("plain TCP", tcp), ("store alone", store), ("whole stream", None)):
                before, began = stream.cpu(), time.monotonic()
                if carry is None:
                    stream.carry(packs)
                else:
                    carry()
                seconds = time.monotonic() - began
                if turn:
                    speeds.setdefault(way, []).append(count * len(payload) / seconds / 1e9)
                    if carry is None:
                        for role, spent in stream.cpu().items():
                            cpu.setdefault(role, []).append((spent - before[role]) / (count * len(payload) / 1e9))
    stream.end()
    medians = {way: statistics.median(found) for way, found in speeds.items()}
    of_store = [a / b for a, b in zip(speeds["whole stream"], speeds["store alone"])]
    rows = [[way, f"{speed:.2f}", f"{speed / medians['plain TCP']:.2f}"] for way, speed in medians.items()]
    print(f"\n### Packs of {name} ({tokens} tokens), medians of {rounds} rounds of {count} packs\n")
    print(markdown(["", "GB/s", "÷ plain TCP"], rows))
    print(f"\nwhole stream ÷ store alone, round by round: {statistics.median(of_store):.2f}", end="; ")
    spent = {role: statistics.median(found) for role, found in cpu.items()}
    print("CPU seconds per GB: " + ", ".join(f"{role} {s:.2f}" for role, s in spent.items()))
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)


def own_passes(name: str, rounds: int) -> None:
    """What the stream's own code does with the bytes, beside one plain copy."""
    tokens, _ = SIZES[name]
    pack = make_packs(tokens, 1)[0]
    features = ReadyMade(SPEC, 0).compute(pack.input_ids, pack.lengths)
    payload = encode_pack(pack)
    identity = pack_id(pack.input_ids, pack.lengths, SPEC.fingerprint)
    named = {"pack": identity, "input_ids": pack.input_ids, "lengths": pack.lengths, "spec": SPEC}
    source, target = np.frombuffer(payload, np.uint8), np.empty(len(payload), np.uint8)
    received = source.copy().data
    ways = {
        "a copy into warm memory": lambda: np.copyto(target, source),
        "a copy into new memory": lambda: source.copy(),
        "encode": lambda: encode(features, **named),
        "decode, of what the store gives": lambda: decode(received, **named),
        "checksum (part of both)": lambda: xxhash.xxh3_128(payload).digest(),
        "check of the values (part of decode)": lambda: check_values(features, SPEC),
    }
    found = {way: [] for way in ways}
    for _ in range(5 * rounds):
        for way, run in ways.items():
            began = time.thread_time()  # CPU time: a busy machine matters less
            run()
            found[way].append(time.thread_time() - began)
    medians = {way: statistics.median(seconds) for way, seconds in found.items()}
    copied = medians["a copy into new memory"]
    rows = [[way, f"{1e3 * s:.2f}", f"{s / copied:.1f}"] for way, s in medians.items()]
    header = ["", "CPU ms", "÷ one copy into new memory"]
    print(f"\n### Passes over a pack of {name}\n\n{markdown(header, rows)}", flush=True)


def waiting(folder: Path, processes: Processes, master: Master) -> None:
    """Who waits when the other side is slower; a step and a forward are sleeps here, so that only the stream works."""
    rows = []
    packs = make_packs(520, 60)
    for name, step, forward in (("trainer", 0.1, 0.0), ("producers", 0.0, 0.1)):
        stream = WholeStream(folder / f"slow-{name}", processes, master, producer_seconds=forward)
        before = stream.client.status()["producers"]
        began = time.monotonic()
        waited = stream.carry(packs, step_seconds=step)
        seconds = time.monotonic() - began
        after = stream.client.status()["producers"]
        idle = [a["idle_seconds"] - b["idle_seconds"] for a, b in zip(after, before)]
        rows.append(
            [name, f"{step * 1e3:.0f}", f"{forward * 1e3:.0f}", f"{waited:.1%}", f"{sum(idle) / 2 / seconds:.0%}"]
        )
        stream.end()
    print("\n### Who waits (packs of 2.4 MB, two producers)\n")
    print(markdown(["slower side", "step, ms", "forward, ms", "trainer waits", "producers idle"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.stream", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="draftsmith-stream-") as folder, Processes(Path(folder)) as processes:
        for name in options.sizes:
            own_passes(name, options.rounds)
        master = processes.start_master()
        for name in options.sizes:
            compare(name, options.rounds, Path(folder), processes, master)
        waiting(Path(folder), processes, master)


if __name__ == "__main__":
    main()
