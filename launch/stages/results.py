"""What comes out of a training: the judgements before and after, and the numbers of summary.json."""

from __future__ import annotations

import gc
import json
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from data_pipelines.engines import Target
from data_pipelines.errors import UserError
from data_pipelines.run_folder import RunFolder
from trainer.checkpoint import newest_step
from trainer.config import RunConfig
from trainer.decoding.judges import NotJudged
from trainer.decoding.placement import place
from trainer.decoding.run import evaluate_run
from trainer.setup import RunSetup

from .records import remembered
from .report import ALL

OFF = "not asked for (evaluate=none)"


def place_judge(config: RunConfig, target: Target) -> str:
    """Where the judge will run and in which precision, or why it will not: known before anything is started."""
    if not config.evaluate.enabled:
        return OFF
    try:
        return f"in {place(target, config.evaluate)}"
    except NotJudged as error:
        return f"NOT JUDGED, the run trains all the same: {error.what}; {error.fix}"


def judge(setup: RunSetup, when: str) -> dict[str, Any]:
    """What `evaluate_run` finds for when="before" or "after", or {"not_judged": the reason}: a run is never stopped by its
    judge. Not judged twice."""
    config = setup.config
    if not config.evaluate.enabled:
        return {"not_judged": OFF}
    if when == "before" and not config.evaluate.before:
        return {"not_judged": "not asked for (evaluate.before=false)"}
    untrained = {key: value for key, value in setup.identity.items() if key not in setup.changes.possible}
    weights = untrained if when == "before" else [training(setup.run_dir)["weights_sha256"], asdict(config.export)]
    depends_on = [weights, asdict(config.evaluate), setup.target.fingerprint]
    try:
        return remembered(setup.run_dir, when, depends_on, lambda: evaluate_run(config, setup.run_dir, when))
    except UserError as error:
        return {"not_judged": error.what}
    except Exception as error:  # whatever a family's code raises, an exhausted GPU among it
        log = setup.folder.logs / f"judge-{when}.log"
        log.parent.mkdir(exist_ok=True)
        log.write_text(traceback.format_exc())
        lines = str(error).strip().splitlines() or [""]
        return {"not_judged": f"{type(error).__name__}: {lines[0][:300]} (more in {log})"}
    finally:
        release_gpus()


def release_gpus() -> None:
    """The ranks and producers that come next need what the judge's target has taken; torch would keep it."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def finished(run_dir: Path, total: int) -> bool:
    """Whether the trainer has left its last checkpoint and its account of all `total` steps."""
    try:
        return newest_step(run_dir) == total == training(run_dir)["steps"]
    except (OSError, ValueError):  # not written yet, or not to its end
        return False


def training(run_dir: Path) -> dict[str, Any]:
    """What the trainer says of the finished training (`training.json`)."""
    return json.loads(RunFolder(run_dir).training.read_text())


def domains(judged: dict[str, Any]) -> dict[str, Any]:
    """Acceptance per domain and over all; nothing of what was not judged."""
    return {} if "not_judged" in judged else {**judged["domains"], ALL: judged["overall"]}


def describe(judged: dict[str, Any]) -> str:
    if reason := judged.get("not_judged"):
        return reason if reason.startswith("not asked for") else f"NOT JUDGED: {reason}"
    length, rounds = judged["overall"]["acceptance_length"], judged["overall"]["rounds"]
    lossless = "lossless" if judged["lossless"] else f"NOT lossless: {len(judged['mismatches'])} texts differ"
    text = f"acceptance length {length:.2f} over {rounds:,} rounds; {lossless}"
    if judged["dtype"] == "float32":
        return text
    gaps = [gap for mismatch in judged["mismatches"] if (gap := mismatch["logit_gap"]) is not None]
    ties = f", where two logits were {max(gaps):.2g} apart or less" if gaps else ""
    return f"{text} (in {judged['dtype']}{ties})"


def summarise(setup: RunSetup, before: dict[str, Any], after: dict[str, Any], exported: Path) -> dict[str, Any]:
    """The content of summary.json."""
    config, trained = setup.config, training(setup.run_dir)
    numbers = ("steps", "packs", "tokens", "seconds", "tokens_per_second", "wait_fraction", "loss", "trained_share")
    judged = [result["lossless"] for result in (before, after) if "not_judged" not in result]
    return {
        "recipe": config.recipe,
        "target": setup.target.name,
        "drafter": config.drafter.name,
        "world_size": trained["world_size"],
        "producers": config.cluster.producers if config.source.streams else 0,
        **{name: trained[name] for name in (*numbers, "weights_sha256")},
        "acceptance": {"before": domains(before), "after": domains(after)},
        "not_judged": after.get("not_judged"),
        "lossless": all(judged) if judged else None,
        "export": str(exported),
    }
