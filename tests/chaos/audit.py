"""What must be true of a run when it is over."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

_STEP = re.compile(r"role=rank-(\d+) msg=step step=(\d+) packs=\"?([\d,]+)\"? session=(\w+)")


def audit_packs(log: Path, steps: int, batch: int) -> tuple[int, int, list[str]]:
    """(packs lost, packs trained on twice, what is wrong in words), from the ranks' own words in the trainer's log.

    Work is redone after a crash. What counts is the lineage of the weights at the end: of each step, the last session that
    did it. Its packs, over all ranks, are to be exactly [step · batch, (step + 1) · batch).
    """
    last: dict[int, str] = {}
    done: dict[tuple[int, str], Counter[int]] = {}
    with log.open(errors="replace") as lines:
        for line in lines:
            if found := _STEP.search(line):
                _, step, packs, session = found.groups()
                last[int(step)] = session
                done.setdefault((int(step), session), Counter()).update(map(int, packs.split(",")))
    lost = twice = 0
    wrong = []
    for step in range(steps):
        wanted = Counter(range(step * batch, (step + 1) * batch))
        trained = done.get((step, last.get(step, "")), Counter())
        missing, surplus = wanted - trained, trained - wanted
        lost += missing.total()
        twice += surplus.total()
        if missing or surplus:
            wrong.append(f"step {step}: lost {sorted(missing)}, twice or not its own {sorted(surplus)}")
    if extra := sorted(step for step in last if step >= steps):
        wrong.append(f"steps after the last: {extra}")
    return lost, twice, wrong


def audit_metrics(run_dir: Path, steps: int) -> list[str]:
    """metrics.jsonl has every step once, in order."""
    rows = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [] if rows == list(range(steps)) else [f"metrics.jsonl has the steps {rows}"]


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def restarts(launcher_log: Path) -> int:
    """How often launchers have started one of their children again."""
    return launcher_log.read_text(errors="replace").count(": restarted (")
