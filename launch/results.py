"""What comes out of a training: the export, the judgements before and after, and the numbers of summary.json."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from data_pipelines.errors import UserError
from trainer.checkpoint import load_checkpoint, whole_checkpoints
from trainer.decoding.run import evaluate_run
from trainer.export.speculators import export_drafter
from trainer.setup import RunSetup
from trainer.target import FrozenTarget

from .records import remembered
from .report import ALL


def judge(setup: RunSetup, when: str) -> dict[str, Any] | None:
    """What `evaluate_run` finds for when="before" or "after"; None if the evaluation is off. Not judged twice."""
    config = setup.config
    if not config.evaluate.enabled:
        return None
    weights = setup.identity if when == "before" else [training(setup.run_dir)["weights_sha256"], asdict(config.export)]
    depends_on = [weights, asdict(config.evaluate), setup.target.fingerprint]
    return remembered(setup.run_dir, when, depends_on, lambda: evaluate_run(config, setup.run_dir, when))


def export(setup: RunSetup, out: Path, step: int | None = None) -> Path:
    """The drafter of a checkpoint (the newest unless `step` names one) in the speculator format. Returns `out`."""
    frozen = FrozenTarget.load(setup.target, torch.float32)
    drafter = setup.build_drafter(frozen)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process reads it: as meant
        load_checkpoint(find_checkpoint(setup.run_dir, step), drafter)
    return export_drafter(drafter, frozen, setup.target, setup.config.export, out, setup.config.evaluate.draft_tokens)


def find_checkpoint(run_dir: Path, step: int | None = None) -> Path:
    """The newest whole checkpoint of a run, or the one of `step`."""
    found = {int(path.name.removeprefix("step_")): path for path in whole_checkpoints(run_dir / "checkpoints")}
    if not found:
        raise UserError(
            "this run has no checkpoint yet", where=str(run_dir), fix="train first: draftsmith run <recipe>"
        )
    if step is not None and step not in found:
        there = ", ".join(map(str, found))
        raise UserError(f"there is no checkpoint of step {step}", where=str(run_dir), fix=f"there are {there}")
    return found[max(found) if step is None else step]


def newest_step(run_dir: Path) -> int:
    """Steps done at the newest whole checkpoint; 0 if there is none."""
    whole = whole_checkpoints(run_dir / "checkpoints")
    return int(whole[-1].name.removeprefix("step_")) if whole else 0


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
    speed = f", {judged['speedup']:.2f}× plain decoding" if judged["speedup"] else ""
    lossless = "lossless" if judged["lossless"] else f"NOT lossless: {len(judged['mismatches'])} texts differ"
    return f"acceptance length {length:.2f} over {rounds:,} rounds{speed}; {lossless}"


def summarise(
    setup: RunSetup, before: dict[str, Any] | None, after: dict[str, Any] | None, exported: Path
) -> dict[str, Any]:
    """The content of summary.json."""
    config, trained = setup.config, training(setup.run_dir)
    streamed = config.source.name in ("stream", "hybrid")
    numbers = ("steps", "packs", "tokens", "seconds", "tokens_per_second", "wait_fraction", "loss", "weights_sha256")
    return {
        "recipe": config.recipe,
        "target": setup.target.name,
        "drafter": config.drafter.name,
        "world_size": trained["world_size"],
        "producers": config.cluster.producers if streamed else 0,
        **{name: trained[name] for name in numbers},
        "acceptance": {"before": domains(before), "after": domains(after)},
        "lossless": before["lossless"] and after["lossless"] if before and after else None,
        "export": str(exported),
    }
