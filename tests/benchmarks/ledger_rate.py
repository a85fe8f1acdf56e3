"""Requests per second of the ledger: CPU time of the real server process per call, call by call.

    python -m tests.benchmarks.ledger_rate [--tokens 500 8000] [--entries 100 5000] [--waiting 10 1000] [--json FILE]

One client process speaks HTTP over as many connections as there are callers. Of these `--waiting` hold a long poll all the
time, half of them as idle producers, half as ranks whose packs are not there yet, as in a big run; the others make the
five calls that a pack needs (want, lease, stored, locate, consumed). The server is one event loop, so that its CPU time
per call is what bounds the calls per second; it hardly depends on who else is on the machine, as the time on the clock does.
What the waiting callers cost by themselves (each asks again every 2 s) is measured first, and not counted with the calls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import tempfile
import time
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from data_pipelines.stores import build_store
from data_pipelines.stores.config import StoreConfig
from data_pipelines.stream.wants import pack_ids

from .processes import Processes, markdown

TOKEN = "a-token-of-this-benchmark"
CALLS = ("want", "lease", "stored", "locate", "consumed")


class Caller:
    """One kept connection. `call` posts JSON and returns the answer."""

    def __init__(self, host: str, port: int):
        self._address, self._streams = (host, port), None

    async def call(self, path: str, body: dict) -> dict:
        return json.loads(await self.send(request(path, body)))

    async def send(self, message: bytes) -> bytes:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address, limit=2**24)
        reader, writer = self._streams
        writer.write(message)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        answer = await reader.readexactly(length)
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{head!r} {answer[:300]!r}")
        return answer


def request(path: str, body: dict) -> bytes:
    text = json.dumps(body).encode()
    head = f"POST /{path} HTTP/1.1\r\nHost: ledger\r\nAuthorization: Bearer {TOKEN}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text


@dataclass
class Load:
    """tokens: of a pack. entries: packs in the window beside those that are counted. waiting: long polls all the time."""

    tokens: int
    entries: int
    waiting: int


def want_body(session: str, index: int, tokens: int, features: str) -> dict:
    ids = b64encode(pack_ids(np.arange(tokens) * 7919 % 150_000)).decode()
    return {
        "session": session, "index": index, "pack": f"{index:032x}", "features": features, "bytes": 1000,
        "input_ids": ids, "lengths": [tokens],
    }  # fmt: skip


async def measure(load: Load, host: str, port: int, server: psutil.Process, packs: int) -> dict[str, float]:
    """CPU seconds of the server per call; per second by `resting` callers; `calls_per_second` on the clock."""
    session = secrets.token_hex(8)
    callers = [Caller(host, port) for _ in range(32)]

    async def all_of(messages: list[bytes]) -> list[dict]:
        """Sent by 32 callers at once."""
        left, answers = iter(list(enumerate(messages))), [None] * len(messages)

        async def work(caller: Caller) -> None:
            for i, message in left:
                answers[i] = await caller.send(message)

        await asyncio.gather(*(work(caller) for caller in callers))
        return [json.loads(answer) for answer in answers]

    def wants(indices: range, features: str) -> list[bytes]:
        return [request("want", {"wants": [want_body(session, i, load.tokens, features)]}) for i in indices]

    def want_id(index: int) -> str:
        return f"{session}-{index}-{index:032x}"

    await all_of(wants(range(10**6, 10**6 + load.entries), "nobody makes these"))
    polls = [asyncio.create_task(poll(Caller(host, port), i, want_id(10**6 + i))) for i in range(load.waiting)]
    await asyncio.sleep(0.5 if load.waiting < 100 else 4.0)  # until they all wait
    before, began = cpu(server), time.monotonic()
    await asyncio.sleep(4.0 if load.waiting else 0.0)
    resting = (cpu(server) - before) / (time.monotonic() - began)
    found, seconds = {}, 0.0
    numbers = range(packs)
    producers = [f"producer-{i % 64}" for i in numbers]  # each leases and stores in turn

    async def timed(name: str, messages: list[bytes]) -> list[dict]:
        nonlocal seconds
        before, began = cpu(server), time.monotonic()
        answers = await all_of(messages)
        took = time.monotonic() - began
        seconds += took
        found[name] = found.get(name, 0.0) + (cpu(server) - before - resting * took) / packs
        return answers

    await timed("want", wants(numbers, "spec"))
    for start in range(0, packs, 64):
        batch = numbers[start : start + 64]
        asked = [
            request("lease", {"producer": producers[i], "features": "spec", "wait": 2.0, "about": {}}) for i in batch
        ]
        leases = [answer["lease"] for answer in await timed("lease", asked)]
        stored = [
            {"producer": producers[i], "want": lease["want"], "lease": lease["lease"], "size": 900, "checksum": "c"}
            for i, lease in zip(batch, leases)
        ]
        for answer in await timed("stored", [request("stored", body) for body in stored]):
            assert answer["accepted"], answer
    located = await timed("locate", [request("locate", {"want": want_id(i), "wait": 2.0}) for i in numbers])
    assert all(where["state"] == "stored" for where in located)
    await timed("consumed", [
        request("consumed", {"want": want_id(i), "lease": where["lease"]}) for i, where in enumerate(located)
    ])  # fmt: skip
    for task in polls:
        task.cancel()
    await asyncio.gather(*polls, return_exceptions=True)
    return {**found, "resting": resting, "calls_per_second": len(CALLS) * packs / seconds}


async def poll(caller: Caller, number: int, want: str) -> None:
    """A caller that waits all the time: an idle producer, or a rank whose pack is not there."""
    idle = {"producer": f"idle-{number}", "features": "what nobody wants", "wait": 2.0, "about": {}}
    message = request("lease", idle) if number % 2 else request("locate", {"want": want, "wait": 2.0})
    while True:
        await caller.send(message)


def master_cost(processes: Processes, packs: int) -> float:
    """CPU seconds of the store's master for the put, get and remove of one object (the object's bytes do not pass it)."""
    master = processes.start_master()
    server = processes.running["master"]
    config = StoreConfig("mooncake", master=master.address, segment_bytes=64 * 1024**2, buffer_bytes=64 * 1024**2)
    stores = build_store(config, role="producer"), build_store(config, role="consumer")
    payload = bytes(1000)
    before = cpu(server)
    for number in range(packs):
        stores[0].put(f"object-{number}", payload)
        stores[1].get(f"object-{number}", len(payload))
        stores[1].remove(f"object-{number}")
    cost = (cpu(server) - before) / packs
    for store in stores:
        store.close()
    return cost


def cpu(server: psutil.Process) -> float:
    return sum(server.cpu_times()[:2])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.ledger_rate", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[500, 8000])
    parser.add_argument("--entries", type=int, nargs="+", default=[100, 5000])
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 10, 100, 1000])
    parser.add_argument("--packs", type=int, default=256)
    parser.add_argument("--json", type=Path, help="write what was measured there")
    options = parser.parse_args()
    measured = []
    with tempfile.TemporaryDirectory(prefix="draftsmith-ledger-") as folder, Processes(Path(folder)) as processes:
        config, token, address = (Path(folder) / name for name in ("config.json", "token", "address"))
        config.write_text("{}")
        token.write_text(TOKEN)
        for tokens in options.tokens:
            for entries in options.entries:
                for waiting in options.waiting:
                    load = Load(tokens, max(entries, waiting), waiting)
                    address.unlink(missing_ok=True)
                    server = processes.python(
                        "ledger", "data_pipelines.stream.server", "--config", str(config), "--token-file", str(token),
                        "--address-file", str(address), "--lease-seconds", "600",
                    )  # fmt: skip
                    processes.wait_for(address.exists)
                    host, _, port = address.read_text().removeprefix("http://").rpartition(":")
                    costs = asyncio.run(measure(load, host, int(port), server, options.packs))
                    measured.append({**vars(load), **costs})
                    print(" ".join(f"{k}={v:.3g}" for k, v in measured[-1].items()), flush=True)
                    server.terminate()
                    server.wait(10)
        master = master_cost(processes, 4000)
    report(measured)
    print(f"The store's master: {1e6 * master:.0f} µs of CPU time for an object's put, get and remove")
    if options.json:
        options.json.write_text(json.dumps(measured, indent=1))


def report(measured: list[dict[str, float]]) -> None:
    rows = [
        [m["tokens"], m["entries"], m["waiting"]]
        + [f"{1e3 * m[call]:.2f}" for call in CALLS]
        + [f"{m['resting']:.0%}", f"{(1 - m['resting']) / sum(m[call] for call in CALLS):,.0f}"]
        + [f"{m['calls_per_second']:,.0f}"]
        for m in measured
    ]
    header = [
        "tokens",
        "in window",
        "waiting",
        *(f"{call}, ms" for call in CALLS),
        "the waiting",
        "packs/s of one core",
        "calls/s here",
    ]
    print("\n" + markdown(header, rows))
    print(f"\nCPU time of the server. Load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
