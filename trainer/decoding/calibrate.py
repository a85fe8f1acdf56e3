"""Calibrating the confidence of a run's exported drafter on held-out decodes; the temperatures go into the export."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_pipelines.conversations.rendering import stop_ids
from data_pipelines.conversations.rows import read_rows
from data_pipelines.engines import resolve_target
from data_pipelines.errors import UserError
from data_pipelines.run_folder import RunFolder

from ..config import RunConfig
from ..export.speculators import load_export
from ..target import FrozenTarget
from .calibration import LEAST_IN_A_BIN, Rounds, describe, fit_temperatures
from .chain import context_limit
from .evaluate import Prompt, decode_speculatively, render_prompts
from .placement import load, place
from .run import write_json

KEY = "confidence_temperatures"


def calibrate_run(config: RunConfig, run_dir: Path) -> dict[str, Any]:
    """Fit the temperatures on one half of config.evaluate's prompts and judge them on the other.

    Every draft of a block is asked for, whatever evaluate.draft_tokens says, since each position has a temperature of its
    own. The temperatures are written to the export's config.json (`confidence_temperatures`, one a position: the
    confidence of draft i is σ(z_i/T_i)) and everything that was measured to `evaluation/calibration.json`:

    `temperatures`, `prompts` and `rounds` of both halves, and `positions`, for each of the drafts `temperature`, `before`
    and `after`, both of the half that was not fitted on (see `calibration.describe`).

    Raises UserError if the exported drafter has no confidence, or the decodes are too few to fit on.
    """
    export = RunFolder(run_dir).export
    target = resolve_target(config.target)
    drafter = load_export(export, target.config)
    if getattr(drafter, "confidence_head", None) is None:
        raise UserError(
            f"this {drafter.config.name} drafter has no confidence to calibrate",
            where=str(export),
            fix="train drafter=dspark with a drafter.confidence_weight above 0",
        )
    placement = place(target, config.evaluate)
    model, tokenizer = load(target, placement), target.load_tokenizer()
    frozen = FrozenTarget(model)
    drafter.to(next(model.parameters()).device, placement.dtype)
    rows = list(read_rows(config.evaluate.prompts, config.evaluate.max_prompts, config.seed))
    prompts, _ = render_prompts(rows, tokenizer, context_limit(model))
    eos_ids = stop_ids(tokenizer, model.generation_config)
    texts, _ = decode_speculatively(model, drafter, frozen, prompts, config.evaluate, drafter.depth, eos_ids)
    halves = halve(prompts, config.seed)
    fitted, held_out = (Rounds.of([texts[i] for i in half]) for half in halves)
    fewest = min(int(rounds.position(drafter.depth)[0].sum()) for rounds in (fitted, held_out))
    if fewest < LEAST_IN_A_BIN:
        raise UserError(
            f"half of the decodes has {fewest} rounds with a draft {drafter.depth}; at least {LEAST_IN_A_BIN} are needed",
            fix="raise evaluate.max_prompts or evaluate.max_new_tokens",
        )
    temperatures = fit_temperatures(fitted)
    before, after = (describe(held_out, t) for t in ([1.0] * drafter.depth, temperatures))
    result = {
        "prompts": {"fitted": len(halves[0]), "held_out": len(halves[1])},
        "rounds": {"fitted": len(fitted.accepted), "held_out": len(held_out.accepted)},
        "temperatures": temperatures,
        "positions": [
            {"temperature": t, "before": b, "after": a} for t, b, a in zip(temperatures, before, after, strict=True)
        ],
    }
    write_json(RunFolder(run_dir).evaluation / "calibration.json", result)
    store(export, temperatures)
    return result


def halve(prompts: Sequence[Prompt], seed: int) -> tuple[list[int], list[int]]:
    """The prompts' indices in two halves, each domain in both: one is fitted on, the other judged."""
    order = list(range(len(prompts)))
    random.Random(seed).shuffle(order)
    order.sort(key=lambda i: prompts[i].domain)  # stable: random within a domain
    return order[::2], order[1::2]


def store(export: Path, temperatures: Sequence[float]) -> None:
    """Readers of the format keep keys that they do not know."""
    path = export / "config.json"
    config = {**json.loads(path.read_text()), KEY: list(temperatures)}
    write_json(path, dict(sorted(config.items())), indent=2)
