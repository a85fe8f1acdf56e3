"""Real small streams beside their simulation: steps per second, who waits, who idles.

    python -m tests.benchmarks.scale_runs [--only NAME …] [--json FILE]

Ledger, store, producers and ranks are real processes, and what is streamed are real packs; only the forward of the target
and the step of the trainer are sleeps, so that two cores suffice. What a call, a read and a put take is measured first, on
two streams of their own, and given to the simulation. Prints markdown.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import secrets
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from data_pipelines.engines import TargetConfig
from data_pipelines.features import payload_bytes
from data_pipelines.logs import configure_logging
from data_pipelines.stores import build_store
from data_pipelines.stores.config import StoreConfig
from data_pipelines.stream import producer
from data_pipelines.stream.client import LedgerClient
from data_pipelines.stream.consumer import Prefetcher
from data_pipelines.stream.messages import producer_config
from data_pipelines.stream.sources import StreamSource
from launch.planner.simulation import simulate
from launch.planner.simulation.parts import Spread
from launch.planner.simulation.scenario import CALLS, Costs, Scenario

from .processes import Master, Processes, markdown
from .ready_made import ReadyMade
from .stream import SPEC, TOKEN, make_packs

SMALL, LARGE = 520, 7000  # tokens of a pack: 2.4 and 32 MB
SKIPPED = 5  # steps before rates are taken


@dataclasses.dataclass(frozen=True)
class Case:
    """A run. window: packs that it holds; 0: no bound. kill: seconds after the start at which producer 0 dies; 0: never."""

    name: str
    ranks: int = 1
    producers: int = 2
    steps: int = 60
    packs_per_rank: int = 1
    tokens: int = SMALL
    compute: float = 0.2
    spread: float = 0.0
    step: float = 0.1
    prefetch: int = 4
    window: int = 0
    kill: float = 0.0
    lease_seconds: float = 60.0

    @property
    def pack_bytes(self) -> int:
        return payload_bytes(SPEC, self.tokens)


CALIBRATION = [
    Case("calibrate", steps=60, compute=0.1, step=0.06),
    Case("calibrate", steps=30, compute=0.3, step=0.2, tokens=LARGE),
]
CASES = [
    Case("one producer, slower than the trainer", producers=1, steps=60, compute=0.2, step=0.05),
    Case("two producers, about as fast", compute=0.3, step=0.15, steps=80),
    Case("three producers, trainer slower", producers=3, compute=0.2, step=0.2, steps=70),
    Case("two ranks, two packs a step", ranks=2, producers=3, packs_per_rank=2, compute=0.2, step=0.1, steps=50),
    Case("uneven forwards, one pack ahead", producers=3, compute=0.4, spread=0.6, step=0.1, prefetch=1, steps=80),
    Case("large packs", producers=2, tokens=LARGE, compute=0.4, step=0.15, steps=50),
    Case("window of two packs", producers=3, compute=0.3, step=0.02, window=2, steps=80),
    Case("a producer dies", compute=0.25, step=0.05, kill=5.0, lease_seconds=3.0, steps=70),
]


class Uneven(ReadyMade):
    """Sleeps as `Spread` draws."""

    def __init__(self, spec, spread: Spread, seed: str):
        super().__init__(spec, 0.0)
        self._spread, self._random = spread, random.Random(seed)

    def compute(self, input_ids, lengths):
        time.sleep(self._spread.draw(self._random))
        return super().compute(input_ids, lengths)


def be_producer(url: str, token_file: str, name: str, seconds: str, spread: str) -> None:
    configure_logging(name)
    engine = Uneven(SPEC, Spread(float(seconds), float(spread)), name)
    producer._build_engine = lambda config, spec: engine
    producer.run_producer(url, Path(token_file).read_text(), name)


def be_rank(url: str, master: str, session: str, rank: str, folder: str, case: str) -> None:
    """Writes what it has seen to `<folder>/rank-<n>.json`."""
    torch.set_num_threads(1)
    case, rank = Case(**json.loads(case)), int(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=case.ranks)
    packs = make_packs(case.tokens, case.ranks * case.packs_per_rank * case.steps)
    store = build_store(StoreConfig("mooncake", master=master), role="consumer")
    source = StreamSource(LedgerClient(url, TOKEN), store, SPEC, session=session, patience_seconds=60, rank=rank)
    timed = {"fetch": [], "get": [], "remove": [], "consumed": [], "want": []}
    for owner, name in ((source, "_fetch"), (store, "get"), (store, "remove")):
        _time(owner, name, timed[name.strip("_")])
    for name in ("consumed", "want"):
        _time(source._client, name, timed[name])
    dist.barrier()
    began = time.monotonic()
    Path(folder, f"began-{rank}").touch()
    prefetcher = Prefetcher(source, list(enumerate(packs))[rank :: case.ranks], case.prefetch)
    steps = []
    for _ in range(case.steps):
        waited = prefetcher.wait_seconds
        for _ in range(case.packs_per_rank):
            next(prefetcher)
        waited = prefetcher.wait_seconds - waited
        dist.barrier()
        time.sleep(case.packs_per_rank * case.step)
        dist.barrier()
        steps.append((time.monotonic() - began, waited))
        if len(steps) == SKIPPED:
            Path(folder, f"warm-{rank}").touch()
    prefetcher.close()
    source.close()
    written = Path(folder, f"rank-{rank}.part")
    written.write_text(json.dumps({"steps": steps, "timed": timed}))
    written.rename(written.with_suffix(".json"))
    dist.destroy_process_group()


def _time(owner, name: str, found: list[float]) -> None:
    function = getattr(owner, name)

    def timed(*arguments, **named):
        began = time.monotonic()
        try:
            return function(*arguments, **named)
        finally:
            found.append(time.monotonic() - began)

    setattr(owner, name, timed)


@dataclasses.dataclass
class Measured:
    """cpu: of the ledger per pack. encode, put: seconds of a producer per pack, the sleep excepted."""

    steps_per_second: float
    wait_fraction: float
    idle_fraction: float
    cpu: float
    encode: float
    put: float
    timed: dict[str, float]


def run(case: Case, folder: Path, processes: Processes, master: Master) -> Measured:
    """The real thing."""
    folder.mkdir()
    here = "tests.benchmarks.scale_runs"
    store = StoreConfig("mooncake", master=master.address)
    config = producer_config(TargetConfig(kind="tiny"), store, SPEC, threads=1, lease_seconds=case.lease_seconds)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "token").write_text(TOKEN)
    address, token = folder / "address", str(folder / "token")
    ledger = processes.python(
        "ledger", "data_pipelines.stream.server", "--config", str(folder / "config.json"), "--token-file", token,
        "--address-file", str(address), "--lease-seconds", str(case.lease_seconds),
        "--window-bytes", str(case.window * case.pack_bytes),
    )  # fmt: skip
    processes.wait_for(address.exists)
    names = [f"producer-{number}" for number in range(case.producers)]
    for name in names:
        processes.python(
            name, here, "be_producer", address.read_text(), token, name, str(case.compute), str(case.spread)
        )
    client = LedgerClient(address.read_text(), TOKEN)
    processes.wait_for(lambda: len(client.status()["producers"]) == case.producers)
    ranks = [f"rank-{rank}" for rank in range(case.ranks)]
    session, described = secrets.token_hex(8), json.dumps(dataclasses.asdict(case))
    for rank, name in enumerate(ranks):
        arguments = (address.read_text(), master.address, session, str(rank), str(folder), described)
        processes.python(name, here, "be_rank", *arguments)
    processes.wait_for((folder / "began-0").exists)
    cpu = sum(ledger.cpu_times()[:2])
    began = time.monotonic()
    processes.wait_for((folder / "warm-0").exists)
    before = client.status()["producers"]
    if case.kill:
        time.sleep(max(0.0, case.kill - (time.monotonic() - began)))
        killed = processes.running.pop(names.pop(0))
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    done = [folder / f"{name}.json" for name in ranks]
    processes.wait_for(lambda: _ended(processes, ranks) and all(path.exists() for path in done))
    after = client.status()["producers"]
    found = [json.loads(path.read_text()) for path in done]
    cpu = sum(ledger.cpu_times()[:2]) - cpu
    client.finish()
    for name in names:
        processes.running.pop(name).wait(30)
    processes.running.pop("ledger").terminate()
    ledger.wait(10)
    client.close()
    ends = [max(step[0] for step in steps) for steps in zip(*(one["steps"] for one in found))]
    waited = [statistics.mean(step[1] for step in steps) for steps in zip(*(one["steps"] for one in found))]
    seconds, stored = ends[-1] - ends[SKIPPED - 1], sum(p["stored"] for p in after)
    lived = case.producers * seconds - (ends[-1] - case.kill if case.kill else 0.0)
    busy = _busy(after) - _busy(before)
    timed = {name: statistics.mean(s for one in found for s in one["timed"][name]) for name in found[0]["timed"]}
    return Measured(
        steps_per_second=(case.steps - SKIPPED) / seconds,
        wait_fraction=sum(waited[SKIPPED:]) / seconds,
        idle_fraction=1 - busy / lived,
        cpu=cpu / stored,
        encode=sum(p["compute_seconds"] for p in after) / stored - case.compute,
        put=sum(p["put_seconds"] for p in after) / stored,
        timed=timed,
    )


def _busy(producers: list[dict]) -> float:
    return sum(p["compute_seconds"] + p["put_seconds"] for p in producers)


def _ended(processes: Processes, names: list[str]) -> bool:
    """Whether all have; they are then no longer watched. Raises if one has failed."""
    for name in names:
        process = processes.running.get(name)
        if process is not None and process.poll() == 0:
            del processes.running[name]
    return not set(names) & set(processes.running)


def calibrate(small: Measured, large: Measured) -> Costs:
    """Service times from two sizes of packs."""
    sizes = [case.pack_bytes for case in CALIBRATION]

    def line(values: tuple[float, float]) -> tuple[float, float]:
        slope = max(0.0, (values[1] - values[0]) / (sizes[1] - sizes[0]))
        return max(0.0, values[0] - slope * sizes[0]), slope

    get, get_byte = line(tuple(m.timed["fetch"] - m.timed["remove"] - m.timed["consumed"] for m in (small, large)))
    put, put_byte = line((small.encode + small.put, large.encode + large.put))
    per_call = small.cpu / 5
    return Costs(
        ledger=dict.fromkeys(CALLS, per_call), ledger_token=0.0, wake=per_call / 4,
        caller=max(0.0, small.timed["consumed"] - per_call), master=0.0,
        put=put, put_byte=put_byte, get=get, get_byte=get_byte, remove=small.timed["remove"],
    )  # fmt: skip


def simulated(case: Case, costs: Costs) -> Scenario:
    return Scenario(
        ranks=case.ranks, producers=case.producers, steps=case.steps, packs_per_rank=case.packs_per_rank,
        tokens=case.tokens, pack_bytes=case.pack_bytes, compute=Spread(case.compute, case.spread), step=Spread(case.step),
        prefetch=case.prefetch, window_bytes=case.window * case.pack_bytes, lease_seconds=case.lease_seconds,
        kills=((case.kill, 0),) if case.kill else (), producer_restart=1e5, latency=0.0, producer_nic=1e12, rank_nic=1e12,
        costs=costs,
    )  # fmt: skip


def compare(case: Case, costs: Costs) -> dict[str, float]:
    """The simulated numbers: means over five seeds where chance has a part."""
    seeds = range(5 if case.spread else 1)
    runs = [simulate(dataclasses.replace(simulated(case, costs), seed=seed), skipped=SKIPPED) for seed in seeds]
    return {
        "steps_per_second": statistics.mean(r.steps_per_second for r in runs),
        "wait_fraction": statistics.mean(r.wait_fraction for r in runs),
        "idle_fraction": statistics.mean(r.idle_fraction for r in runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.scale_runs", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[case.name for case in CASES])
    parser.add_argument("--json", type=Path, help="write what was measured and simulated there")
    options = parser.parse_args()
    rows, found = [], []
    with tempfile.TemporaryDirectory(prefix="draftsmith-scale-") as folder, Processes(Path(folder)) as processes:
        master = processes.start_master()
        costs = calibrate(*(run(c, Path(folder, f"c{i}"), processes, master) for i, c in enumerate(CALIBRATION)))
        print(costs, flush=True)
        for number, case in enumerate(case for case in CASES if case.name in options.only):
            measured = run(case, Path(folder, str(number)), processes, master)
            predicted = compare(case, costs)
            found.append(
                {"case": dataclasses.asdict(case), "measured": dataclasses.asdict(measured), "simulated": predicted}
            )
            off = predicted["steps_per_second"] / measured.steps_per_second - 1
            rows.append(
                [case.name, f"{measured.steps_per_second:.2f}", f"{predicted['steps_per_second']:.2f}", f"{off:+.1%}"]
            )
            for name in ("wait_fraction", "idle_fraction"):
                rows[-1] += [f"{getattr(measured, name):.1%}", f"{predicted[name]:.1%}"]
            print(rows[-1], flush=True)
    header = ["", "steps/s", "simulated", "off by", "ranks wait", "simulated", "producers idle", "simulated"]
    print("\n" + markdown(header, rows))
    print(f"\nload of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if options.json:
        options.json.write_text(json.dumps({"costs": dataclasses.asdict(costs), "runs": found}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["be_producer"]:
        be_producer(*sys.argv[2:])
    elif sys.argv[1:2] == ["be_rank"]:
        be_rank(*sys.argv[2:])
    else:
        main()
