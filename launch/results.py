"""What comes out of a training: the judgements before and after, and the numbers of summary.json."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.checkpoint import newest_step
from trainer.decoding.run import evaluate_run
from trainer.setup import RunSetup

from .records import remembered
from .report import ALL


def judge(setup: RunSetup, when: str) -> dict[str, Any] | None:
    """What `evaluate_run` finds for when="before" or "after"; None if the evaluation is off. Not judged twice."""
    config = setup.config
    if not config.evaluate.enabled:
        return None
    untrained = {key: value for key, value in setup.identity.items() if key not in setup.changes.possible}
    weights = untrained if when == "before" else [training(setup.run_dir)["weights_sha256"], asdict(config.export)]
    depends_on = [weights, asdict(config.evaluate), setup.target.fingerprint]
    return remembered(setup.run_dir, when, depends_on, lambda: evaluate_run(config, setup.run_dir, when))


def finished(run_dir: Path, total: int) -> bool:
    """Whether the trainer has left its last checkpoint and its account of all `total` steps."""
    try:
        return newest_step(run_dir) == total == training(run_dir)["steps"]
    except (OSError, ValueError):  # not written yet, or not to its end
        return False


def training(run_dir: Path) -> dict[str, Any]:
    """What the trainer says of the finished training (`training.json`)."""
    return json.loads((run_dir / "training.json").read_text())


def domains(judged: dict[str, Any] | None) -> dict[str, Any]:
    """Acceptance per domain and over all."""
    return {**judged["domains"], ALL: judged["overall"]} if judged else {}


def describe(judged: dict[str, Any] | None) -> str:
    if judged is None:
        return "not asked for (evaluate=none)"
    length, rounds = judged["overall"]["acceptance_length"], judged["overall"]["rounds"]
    lossless = "lossless" if judged["lossless"] else f"NOT lossless: {len(judged['mismatches'])} texts differ"
    return f"acceptance length {length:.2f} over {rounds:,} rounds; {lossless}"


def summarise(
    setup: RunSetup, before: dict[str, Any] | None, after: dict[str, Any] | None, exported: Path
) -> dict[str, Any]:
    """The content of summary.json."""
    config, trained = setup.config, training(setup.run_dir)
    streamed = config.source.name in ("stream", "hybrid")
    numbers = ("steps", "packs", "tokens", "seconds", "tokens_per_second", "wait_fraction", "loss", "trained_share")
    return {
        "recipe": config.recipe,
        "target": setup.target.name,
        "drafter": config.drafter.name,
        "world_size": trained["world_size"],
        "producers": config.cluster.producers if streamed else 0,
        **{name: trained[name] for name in (*numbers, "weights_sha256")},
        "acceptance": {"before": domains(before), "after": domains(after)},
        "lossless": before["lossless"] and after["lossless"] if before and after else None,
        "export": str(exported),
    }
