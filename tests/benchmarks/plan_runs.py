"""Real runs beside their plans: CPU seconds of a pack, and resident memory.

    python -m tests.benchmarks.plan_runs --hardware node.yaml [--only ci_eagle3 …] [--json FILE]

One rank, with the target in its process, so that a step holds all that producers and ranks do; CPU time, because who else
is on the machine changes it little. Each recipe runs twice, and what the longer run took more is divided by the packs that
it did more: what a process does before its first step counts for neither. Prints markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

from launch.planner.plan import make_plan
from launch.planner.volume import Volume
from trainer.config import RunConfig, load_config
from trainer.setup import prepare_run

from .processes import markdown

STEPS = {"demo": (3, 10), "ci": (8, 40)}  # of the two runs, by what the recipe's name begins with
RECIPES = [f"{kind}{drafter}" for kind in ("ci", "demo") for drafter in ("_eagle3", "_mtp", "_dflash", "_dspark")]


def overrides(folder: Path, hardware: str, steps: int) -> list[str]:
    return [
        f"run_dir={folder}", f"max_steps={steps}", "source=colocated", "store=memory", "cluster.ranks=1", "resume=never",
        f"cluster.hardware.device={hardware}", "checkpoint.every=1000000", "cluster.threads=1",
    ]  # fmt: skip


def run(recipe: str, options: list[str]) -> tuple[float, float]:
    """CPU seconds of one rank, from start to end, and its largest resident memory in bytes."""
    arguments = [sys.executable, "-m", "trainer.train", "--config-name", recipe, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(os.devnull, "w") as nowhere:
        pid = os.posix_spawn(
            arguments[0], arguments, environment,
            file_actions=[(os.POSIX_SPAWN_DUP2, nowhere.fileno(), 1), (os.POSIX_SPAWN_DUP2, nowhere.fileno(), 2)],
        )  # fmt: skip
    _, status, used = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"{recipe} ended with status {status}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def volume_of(config: RunConfig) -> Volume:
    """Of the data as they are trained on."""
    prepared = prepare_run(config).prepared
    lengths = prepared.documents.lengths
    counts = prepared.counts
    return Volume(
        counts.documents, counts.tokens / counts.documents, counts.supervised / counts.tokens,
        spread=float(np.std(lengths) / np.mean(lengths)), measured=True,
    )  # fmt: skip


def beside(recipe: str, hardware: str, folder: Path) -> dict[str, float | str]:
    name = {"demo_eagle3": "demo"}.get(recipe, recipe)
    short, long = STEPS[recipe.partition("_")[0]]
    config = load_config(name, overrides(folder / "plan", hardware, long))
    plan = make_plan(config, volume_of(config))
    (few, _), (many, memory) = (
        run(name, overrides(folder / f"{recipe}-{steps}", hardware, steps)) for steps in (short, long)
    )
    packs = (long - short) * config.global_batch
    return {
        "run": recipe,
        "planned": plan.inference["seconds_per_pack"] + plan.training["seconds_per_pack"],
        "measured": (many - few) / packs,
        "planned_memory": sum(plan.memory["rank"].values()) + sum(plan.memory["rank_host"].values()),
        "measured_memory": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.plan_runs", description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", default="cpu", help="a row of the planner's table, or bench-node's file")
    parser.add_argument("--only", nargs="+", default=RECIPES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory(prefix="draftsmith-plan-") as folder:
        for recipe in options.only:
            found.append(beside(recipe, options.hardware, Path(folder)))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    rows = [
        [
            m["run"],
            *_beside(1e3 * m["planned"], 1e3 * m["measured"], ",.0f"),
            *_beside(m["planned_memory"] / 1e9, m["measured_memory"] / 1e9, ".2f"),
        ]
        for m in found
    ]
    header = ["run", "planned, ms a pack", "measured", "off by", "planned, GB", "measured", "off by"]
    print(markdown(header, rows))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def _beside(planned: float, measured: float, spec: str) -> tuple[str, str, str]:
    return f"{planned:{spec}}", f"{measured:{spec}}", f"{planned / measured - 1:+.0%}"


if __name__ == "__main__":
    main()
