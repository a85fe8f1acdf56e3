"""What distance costs: one stream and one training across a link whose delay grows while they run.

    python -m tests.benchmarks.nodes [--rate 12.5e6] [--delays 0 0.005 0.02] [--steps 12]

Two machines as in `tests.machines`, every role by the commands of docs/cluster.md. First master, ledger and producers on one
machine and a single rank on the other, with 2 and with 8 packs of prefetch: then all that crosses is the stream. Then a rank
on each: their collectives cross too, and half of the stream.
"waiting" is the share of time that a rank had no pack. Needs root.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from data_pipelines.features import payload_bytes
from tests.launch.nodes.cluster import Cluster, Role
from tests.launch.runs import steps
from tests.machines import two_machines
from tests.trainer.running import RECIPE, metrics
from trainer.config import load_config
from trainer.setup import prepare_run

from .processes import markdown

HEADER = ["trainer", "prefetch", "delay, ms", "s a step", "waiting", "ms waited a pack", "kB over the link a pack"]
WARM = 4  # steps before anything is measured
ONE_RANK = {"--nnodes 2": "--nnodes 1", "is_host=false": "is_host=true", "$HEAD:29500": "$ME:29500"}


def follow(cluster: Cluster, roles: list[Role], run_dir: Path, delays: list[float], count: int) -> list[list]:
    """Sets one delay after another, each for `count` steps of the run. Returns what was measured under each."""
    marks, moved = [], []
    for delay in delays:
        cluster.link.set(delay=delay)
        begin = steps(run_dir)
        roles[0].wait_for(lambda begin=begin: steps(run_dir) >= max(begin + 1, WARM), 300)
        before, begin = sum(cluster.link.bytes()), steps(run_dir)
        roles[0].wait_for(lambda begin=begin: steps(run_dir) >= begin + count, 600)
        marks.append((begin, steps(run_dir)))
        moved.append(sum(cluster.link.bytes()) - before)
    for role in roles:
        role.process.wait(600)
    cluster.link.set(delay=0.0)
    found = []
    for delay, (begin, end), crossed in zip(delays, marks, moved):
        rows = metrics(run_dir)[begin:end]
        seconds, waited, packs = (sum(row[key] for row in rows) for key in ("seconds", "wait_seconds", "packs"))
        parts = [f"{delay * 1e3:g}", f"{seconds / len(rows):.2f}", f"{waited / seconds:.0%}"]
        found.append([*parts, f"{waited / packs * 1e3:.0f}", f"{crossed / packs / 1e3:.1f}"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.nodes", description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", type=float, default=12.5e6, help="bytes a second")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.005, 0.02], help="seconds, one way")
    parser.add_argument("--steps", type=int, default=12, help="for each delay")
    options = parser.parse_args()
    total = WARM + (options.steps + 3) * len(options.delays)
    recipe = [*RECIPE, "epochs=99", f"max_steps={total}", "checkpoint.every=999", "evaluate=none", "source=stream"]
    rows = []
    with tempfile.TemporaryDirectory() as folder, two_machines(Path(folder), rate=options.rate) as (a, b, link):
        cluster = Cluster(Path(folder), (a, b), link, ["ci_eagle3", *recipe])
        cluster.producers[b].wait_for(lambda: "serves" in cluster.producers[b].said())
        for producer in b.processes("produce"):
            producer.kill()
        for title, prefetch in (("one rank", 2), ("one rank", 8), ("two ranks", 8)):
            run_dir = Path(folder) / f"{title} {prefetch}".replace(" ", "-")
            own = {"$RUN/config.yaml": f"$RUN/config.yaml run_dir={run_dir} source.prefetch={prefetch}"}
            if title == "one rank":
                roles = [cluster.start(b, "the other trainer nodes", **ONE_RANK, **own)]
            else:
                roles = cluster.start_trainers(**own)
            found = follow(cluster, roles, run_dir, options.delays, options.steps)
            rows += [[title, prefetch, *row] for row in found]
    setup = prepare_run(load_config("ci_eagle3", [*recipe, f"run_dir={tempfile.mkdtemp()}"]))
    packs = [payload_bytes(setup.spec, len(setup.plan[i])) for i in range(total * setup.config.global_batch)]
    print(markdown(HEADER, rows))
    print(
        f"\nby the formula a pack has {sum(packs) / len(packs) / 1e3:.1f} kB; {options.rate * 8 / 1e6:g} Mbit/s;",
        end=" ",
    )
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
