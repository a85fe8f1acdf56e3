"""What breaks first: recipes for real targets, simulated up to 1,024 ranks and 4,096 producers.

    python -m tests.benchmarks.scale_study [--out docs] [--most 1024]

Writes <out>/scale_throughput.png, scale_load.png and scale_failures.png, and prints the same as markdown. Nothing is measured
here: service times are those of `simulation.scenario.Costs`, seconds of a forward and a step those of `draftsmith plan`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import multiprocessing
import os
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

from matplotlib.figure import Figure

from launch.planner.command import read_recipe
from launch.planner.job import make_job
from launch.planner.simulation import simulate
from launch.planner.simulation.command import SKIPPED, scenario_of
from launch.planner.simulation.scenario import Costs, Result, Scenario

from .processes import markdown

PRODUCERS_PER_RANK = 4
STEPS = 4
# name, recipe, volume, packs of a rank in a step
TARGETS = {
    "Llama-3.1-8B, packs of 4,096": ("llama31_8b_eagle3", {"samples": 120e3, "mean_tokens": 1000.0}, 2),
    "Kimi-K2, packs of 20,000": ("kimi_k2_eagle3", {"samples": 600e3, "tokens": 6e9}, 1),
}
_STORMY = "Llama-3.1-8B, packs of 4,096"
SLOW_PARSER = 1.8  # what the ledger's calls cost without httptools and uvloop, measured


def scenario(recipe: str, volume: dict, ranks: int, packs: int, *overrides: str, **more) -> Scenario:
    config, data = read_recipe(
        recipe,
        [
            f"cluster.ranks={ranks}",
            f"cluster.producers={PRODUCERS_PER_RANK * ranks}",
            f"global_batch={ranks * packs}",
            *overrides,
        ],
        **volume,
    )
    return scenario_of(make_job(config, data), steps=STEPS, **more)


def variants(name: str) -> dict[str, dict]:
    """What if."""
    slow = {call: SLOW_PARSER * seconds for call, seconds in Costs().ledger.items()}
    found = {
        "as it is": {},
        "HTTP parsed in Python": {"costs": Costs(ledger=slow, wake=SLOW_PARSER * Costs().wake)},
        "long polls of 10 s": {"poll_seconds": 10.0},
    }
    if "8B" in name:
        found["4 ledgers"] = {"ledgers": 4}
        found["packs of 16,384"] = {"overrides": ["data.pack_tokens=16384", "store.segment_bytes=2147483648"]}
        found["16 ledgers"] = {"ledgers": 16}
    return found


def one(name: str, variant: str, ranks: int) -> Result:
    recipe, volume, packs = TARGETS[name]
    changes = variants(name)[variant]
    overrides = changes.pop("overrides", [])
    return simulate(scenario(recipe, volume, ranks, packs, *overrides, **changes), skipped=SKIPPED)


def sweep(pool: Executor, most: int) -> dict[str, dict[str, dict[int, Result]]]:
    """Target → variant → ranks → result."""
    sizes = [size for size in (16, 64, 256, 512, 1024) if size <= most]
    asked = [(name, variant, ranks) for ranks in reversed(sizes) for name in TARGETS for variant in variants(name)]
    running = {key: pool.submit(one, *key) for key in asked}  # the longest begin first
    found: dict[str, dict[str, dict[int, Result]]] = {}
    for name in TARGETS:
        for variant in variants(name):
            found.setdefault(name, {})[variant] = {ranks: running[name, variant, ranks].result() for ranks in sizes}
    return found


def one_storm(lease_seconds: int, pause: float) -> Result:
    recipe, volume, packs = TARGETS[_STORMY]
    calm = scenario(recipe, volume, 8, packs, f"source.lease_seconds={lease_seconds}", "cluster.producers=8")
    mtbf = 8 * pause if pause < math.inf else 0.0
    stormy = dataclasses.replace(
        calm, steps=1200, stop_after=0, producer_mtbf=mtbf, producer_restart=30.0, max_attempts=100
    )
    return simulate(stormy, skipped=SKIPPED)


def failures(pool: Executor) -> dict[str, dict[float, Result]]:
    """Lease seconds → seconds between two deaths → result, of 8 ranks with 8 producers: as many as keep the ranks busy."""
    pauses = (math.inf, 120.0, 30.0, 10.0)
    running = {(lease, pause): pool.submit(one_storm, lease, pause) for lease in (60, 15, 5) for pause in pauses}
    return {f"lease of {lease} s": {pause: running[lease, pause].result() for pause in pauses} for lease in (60, 15, 5)}


def plot_throughput(found: dict[str, dict[str, dict[int, Result]]], path: Path) -> None:
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axes, (name, by_variant) in zip(figure.subplots(1, len(found)), found.items()):
        top = 0.0
        for variant, results in by_variant.items():
            rates = [result.tokens_per_second / ranks for ranks, result in results.items()]
            top = max(top, *rates)
            axes.plot(list(results), rates, marker="o", markersize=3, label=variant)
        axes.set(xscale="log", xlabel=f"trainer ranks (producers: {PRODUCERS_PER_RANK} × as many)", title=name)
        axes.set(ylabel="tokens/s of a rank", ylim=(0, 1.15 * top))
        axes.set_xticks(list(results), [f"{ranks:,}" for ranks in results], minor=False)
        axes.minorticks_off()
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def plot_load(found: dict[str, dict[str, dict[int, Result]]], path: Path) -> None:
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    shown = {
        "ledger": "ledger's loop", "master": "store's master", "rank_nic": "trainer nodes' network",
        "producer_nic": "inference nodes' network", "window": "window", "lost_fraction": "(time lost)",
    }  # fmt: skip
    for axes, (name, by_variant) in zip(figure.subplots(1, len(found)), found.items()):
        results = by_variant["as it is"]
        for field, text in shown.items():
            style = "--" if text.startswith("(") else "-"
            axes.plot(
                list(results),
                [max(getattr(r, field), 1e-4) for r in results.values()],  # 0 has no logarithm
                style,
                marker="o",
                markersize=3,
                label=text,
            )
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="trainer ranks",
            ylabel="share of its capacity",
            title=name,
            ylim=(1e-4, 1.5),
        )
        axes.set_xticks(list(results), [f"{ranks:,}" for ranks in results], minor=False)
        axes.minorticks_off()
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def plot_failures(found: dict[str, dict[float, Result]], path: Path) -> None:
    figure = Figure(figsize=(5.5, 3.8), layout="constrained")
    axes = figure.subplots()
    for label, results in found.items():
        calm, pauses = results[math.inf].tokens_per_second, [pause for pause in results if pause < math.inf]
        axes.plot(pauses, [results[p].tokens_per_second / calm for p in pauses], marker="o", label=label)
    axes.set(xscale="log", xlabel="mean time between deaths of any producer, seconds", ylim=(0, 1.05))
    axes.set(ylabel="tokens/s, of those without deaths")
    axes.set_xticks(pauses, [f"{pause:g}" for pause in pauses], minor=False)
    axes.minorticks_off()
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def speed(result: Result) -> str:
    return f"{result.tokens_per_second / 1e3:,.0f} ({result.lost_fraction:.0%}; {result.wait_fraction:.0%})"


def tables(found: dict[str, dict[str, dict[int, Result]]]) -> None:
    for name, by_variant in found.items():
        sizes = list(by_variant["as it is"])
        print(
            f"\n**{name}**: thousand tokens/s in all (share of the time lost; that ranks wait for packs of their own)\n"
        )
        rows = [[variant, *map(speed, results.values())] for variant, results in by_variant.items()]
        print(markdown(["", *(f"{ranks:,} ranks" for ranks in sizes)], rows))
        print(f"\n**{name}**, as it is: share of each station's capacity\n")
        fields = {
            "requests/s to the ledger": lambda r: f"{r.requests_per_second:,.0f}",
            "ledger's loop": lambda r: f"{r.ledger:.0%}",
            "… a request's wait for its turn, ms": lambda r: f"{1e3 * r.ledger_queue:.1f}",
            "store's master": lambda r: f"{r.master:.1%}",
            "busiest trainer node's network": lambda r: f"{r.rank_nic:.1%}",
            "busiest inference node's network": lambda r: f"{r.producer_nic:.1%}",
            "window, at most": lambda r: f"{r.window:.0%}",
            "producers idle": lambda r: f"{r.idle_fraction:.0%}",
        }
        rows = [[text, *(show(r) for r in by_variant["as it is"].values())] for text, show in fields.items()]
        print(markdown(["", *(f"{ranks:,} ranks" for ranks in sizes)], rows))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.scale_study", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--most", type=int, default=1024, help="ranks")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args()
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        found, died = sweep(pool, options.most), failures(pool)
    plot_throughput(found, options.out / "scale_throughput.png")
    plot_load(found, options.out / "scale_load.png")
    tables(found)
    plot_failures(died, options.out / "scale_failures.png")
    print(
        "\n**Producers die** (Llama-3.1-8B, 8 ranks, 8 producers, back after 30 s): tokens/s, of those without deaths\n"
    )
    pauses = [pause for pause in next(iter(died.values())) if pause < math.inf]
    rows = [
        [label, *(f"{results[pause].tokens_per_second / results[math.inf].tokens_per_second:.0%}" for pause in pauses)]
        for label, results in died.items()
    ]
    print(markdown(["", *(f"one in {pause:g} s" for pause in pauses)], rows))


if __name__ == "__main__":
    main()
