"""Many small packs through the real stream: does anything grow, is anything left?

    python -m tests.benchmarks.soak --packs 20000

Store, ledger, two producers and a trainer rank are processes of their own, the tiny target computes. Meanwhile one object in
`--lose-every` is taken out of the store before it is read. Prints medians of the first, the second and the last quarter of
the packs; exit status 1 when memory, file descriptors or threads grew, or something is left at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

from data_pipelines.stores import build_store
from data_pipelines.stores.config import StoreConfig
from data_pipelines.stream.client import LedgerClient
from data_pipelines.stream.messages import read_token
from launch.supervision.processes import free_port

from .processes import HOST, Master, Processes, markdown

ROWS = 2000  # conversations; epochs make as many packs of them as are asked for
STEP = 10  # packs in an optimizer step
MAY_GROW = {"rss": (0.05, 20), "fds": (0.0, 4), "threads": (0.0, 4)}  # part, or MB or number, whichever is more
UNITS = {"rss": "MB", "fds": "", "threads": ""}


def write_rows(path: Path) -> None:
    """Conversations of 16 to 48 tokens of the tiny target."""
    rng = random.Random(0)
    words = ["one", "two", "three", "four", "river", "sea", "box", "open", "close", "Monday", "mountain", "rain"]
    with path.open("w") as file:
        for _ in range(ROWS):
            asked, said = (" ".join(rng.choices(words, k=rng.randint(*k))) for k in ((1, 4), (4, 22)))
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            file.write(json.dumps({"messages": messages}) + "\n")


def soak(packs: int, lose_every: int, folder: Path) -> int:
    rows, run_dir, port = folder / "rows.jsonl", folder / "run", free_port(HOST)
    write_rows(rows)
    with Processes(folder) as processes:
        master = processes.start_master()
        processes.python(
            "ledger", "launch.cli", "ledger", "ci_eagle3", f"run_dir={run_dir}", f"cluster.ledger_port={port}",
            f"store.master={master.address}", f"store.segment_bytes={16 * 1024**2}", "source.prefetch=16",
            f"data.path={rows}", f"data.max_rows={ROWS}", "data.pack_tokens=48", "data.max_document_tokens=48",
            "data.regenerate.mode=never", f"epochs={2 * packs // ROWS + 1}", f"global_batch={STEP}",
            f"max_steps={packs // STEP}", "checkpoint.every=500", "cluster.ranks=1",
        )  # fmt: skip
        token, url = run_dir / "ledger.token", f"http://{HOST}:{port}"
        processes.wait_for((run_dir / "ledger.json").exists)
        for name in ("producer-a", "producer-b"):
            processes.python(name, "launch.cli", "produce", "--ledger", url, "--token-file", str(token), "--name", name)
        client = LedgerClient(url, read_token(str(token)))
        processes.wait_for(lambda: len(client.status()["producers"]) == 2)
        rank = processes.python("rank", "trainer.train", "--config", str(run_dir / "config.yaml"))
        thief = build_store(StoreConfig("mooncake", master=master.address), role="consumer")  # after the last start
        began = time.monotonic()
        samples, mapped = watch(processes, client, master, thief, rank, lose_every)
        seconds = time.monotonic() - began
        thief.close()
        if rank.returncode:
            raise RuntimeError(f"the rank ended with {rank.returncode}:\n{processes.said('rank')[-3000:]}")
        complaints = grown(samples, packs)
        totals = client.status()["totals"]
        left = wait_empty(master)
        for name in ("producer-a", "producer-b", "ledger", "master"):
            if name in ("ledger", "master"):
                processes.running[name].send_signal(signal.SIGTERM)
            if processes.running[name].wait(30) != 0 and name != "master":
                complaints.append(f"{name} ended with {processes.running[name].returncode}")
    children = psutil.Process().children(recursive=True)
    rate = packs / seconds
    print(f"\n{packs} packs in {seconds:.0f} s ({rate:.0f} a second); ledger: {totals}")
    if totals["consumed"] != packs // STEP * STEP:
        complaints.append(f"{totals['consumed']} packs were consumed")
    if totals["lost"] < packs // lose_every // 2:
        complaints.append(f"only {totals['lost']} packs were lost on purpose: the soak has not tried that path")
    if left != (0, 0):
        complaints.append(f"the store still holds {left[0]} objects, {left[1]} bytes")
    if children:
        complaints.append(f"processes are left: {children}")
    if shared := [path for path in mapped if Path(path).exists()]:
        complaints.append(f"shared memory is left: {shared}")
    print("\n" + ("\n".join(f"FAIL: {line}" for line in complaints) or "nothing grew, nothing is left"))
    return 1 if complaints else 0


def watch(
    processes: Processes, client: LedgerClient, master: Master, thief, rank, lose_every: int
) -> tuple[list[dict], set[str]]:
    """Until the consumer has ended: samples of everything, one every two seconds, and all files of shared memory that any
    process has mapped."""
    samples, mapped, next_sample, next_theft = [], set(), 0.0, 0.0
    while rank.poll() is None:
        totals = client.status()["totals"]
        due = totals["stored"] // lose_every > totals["lost"] and time.monotonic() >= next_theft
        if due and (keys := master.keys()):
            thief.remove(random.choice(keys))
            next_theft = time.monotonic() + 2  # until the rank has met with it, or has been quicker
        if time.monotonic() >= next_sample:
            next_sample = time.monotonic() + 0.5
            objects, size = master.holds()
            sample = {"consumed": totals["consumed"], "store": {"objects": objects, "kB": size // 1000}}
            for name, process in processes.running.items():
                try:
                    maps = Path(f"/proc/{process.pid}/maps").read_text()
                    mapped |= {line.split()[5] for line in maps.splitlines() if " /dev/shm/" in line}
                    with process.oneshot():
                        sample[name] = {
                            "rss": process.memory_info().rss / 1e6,
                            "fds": process.num_fds(),
                            "threads": process.num_threads(),
                            "ports": len([c for c in process.net_connections("tcp") if c.status == "LISTEN"]),
                        }
                except (psutil.Error, OSError):
                    break  # it has just ended
            else:
                if totals["consumed"] and sum(
                    client.status()["packs"].values()
                ):  # not before the first, nor after the last
                    samples.append(sample)
        time.sleep(0.1)
    return samples, mapped


def grown(samples: list[dict], packs: int) -> list[str]:
    """Prints the medians of the second and the last quarter; returns what has grown too much."""

    def median(quarter: int, who: str, what: str) -> float:
        chosen = [s[who][what] for s in samples if s["consumed"] * 4 // (packs + 1) == quarter]
        return statistics.median(chosen) if chosen else float("nan")

    rows, complaints = [], []
    for who in [name for name in samples[0] if name != "consumed"]:
        for what in samples[0][who]:
            before, after = median(1, who, what), median(3, who, what)
            rows.append([who, what, f"{median(0, who, what):.0f}", f"{before:.0f}", f"{after:.0f}"])
            part, least = MAY_GROW.get(what, (0.0, 0.0))
            if what in MAY_GROW and not after - before <= max(part * before, least):
                complaints.append(f"{who}: {what} grew from {before:.0f} to {after:.0f} {UNITS[what]}")
    print(markdown(["process", "", "first quarter", "second", "last"], rows))
    return complaints


def wait_empty(master: Master, seconds: float = 30.0) -> tuple[int, int]:
    """(objects, bytes) in the store once it is empty, or when the time is over."""
    deadline = time.monotonic() + seconds
    while (held := master.holds()) != (0, 0) and time.monotonic() < deadline:
        time.sleep(0.2)
    return held


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--packs", type=int, default=20_000)
    parser.add_argument("--lose-every", type=int, default=500, help="packs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="draftsmith-soak-") as folder:
        return soak(options.packs, options.lose_every, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
