"""Judging a run's drafter before and after training, and keeping what was found in `<run_dir>/evaluation`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from data_pipelines.conversations.rendering import stop_ids
from data_pipelines.conversations.rows import read_rows
from data_pipelines.engines import Target, resolve_target
from data_pipelines.errors import UserError
from data_pipelines.files import write_text_atomically
from data_pipelines.run_folder import RunFolder

from ..config import RunConfig
from ..drafters.base import Drafter
from ..export.speculators import load_export
from ..setup import prepare_run
from ..target import FrozenTarget
from .chain import Decoded, context_limit
from .config import EvaluateConfig
from .evaluate import Prompt, Reference, decode_reference, evaluate, render_prompts
from .judges import find_way
from .placement import load, place


def evaluate_run(config: RunConfig, run_dir: Path, when: str, name: str = "") -> dict[str, Any]:
    """Judge the untrained drafter (when="before") or the exported one (when="after") on config.evaluate's prompts.

    Everything is computed in float32 where that fits (see `placement`), whatever was trained in: bfloat16 flips near ties,
    and a text would then differ from plain decoding for no fault of the drafter's. Writes `evaluation/<when>.json` and
    returns it (see `evaluate.evaluate`). Plain decoding is kept in `evaluation/reference.json` for the next time.
    Raises NotJudged if this machine cannot hold the target, or no judge can decode it.
    """
    if when not in ("before", "after"):
        raise UserError(f"when={when} is neither before nor after")
    folder = RunFolder(run_dir).evaluation
    target = resolve_target(config.target)

    def drafter(frozen: FrozenTarget) -> Drafter:
        return _drafter(config, Path(run_dir), target, frozen, when)

    kept = folder / f"{name and name + '-'}reference.json"
    result = {"when": when, **judge_drafter(target, drafter, config.evaluate, config.seed, kept)}
    write_json(folder / f"{name or when}.json", result)
    return result


def judge_drafter(
    target: Target,
    build: Callable[[FrozenTarget], Drafter],
    cfg: EvaluateConfig,
    seed: int,
    kept: Path | None = None,
) -> dict[str, Any]:
    """What `evaluate.evaluate` finds of the drafter that `build` gives, on cfg's prompts. kept: the file of plain decoding,
    read if it is of the same, else written; None: it is decoded and not kept."""
    placement = place(target, cfg)
    model, tokenizer = load(target, placement), target.load_tokenizer()
    frozen = FrozenTarget(model)
    drafter = build(frozen).eval().to(next(model.parameters()).device, placement.dtype)
    rows = list(read_rows(cfg.prompts, cfg.max_prompts, seed))
    reference = None
    if kept is not None:
        prompts, _ = render_prompts(rows, tokenizer, context_limit(model))
        eos_ids = stop_ids(tokenizer, model.generation_config)
        reference = _kept_reference(kept, model, target, prompts, cfg, eos_ids)
    return evaluate(model, tokenizer, drafter, frozen, rows, cfg, reference)


def _drafter(config: RunConfig, run_dir: Path, target: Target, frozen: FrozenTarget, when: str) -> Drafter:
    if when == "after":
        return load_export(RunFolder(run_dir).export, target.config)
    return prepare_run(config).build_drafter(frozen)


def _kept_reference(
    path: Path, model: nn.Module, target: Target, prompts: list[Prompt], cfg: EvaluateConfig, eos_ids: list[int]
) -> Reference:
    """Plain decoding of these prompts, from `path` if that is whole and of the same target, prompts and limits."""
    tokens = [prompt.tokens for prompt in prompts]
    arithmetic = [str(model.dtype), find_way(model)]
    what = [target.fingerprint, tokens, cfg.max_new_tokens, cfg.batch_size, eos_ids, arithmetic]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]
    try:
        kept = json.loads(path.read_text())
        if kept["key"] == key:
            return Reference(kept["seconds"], [Decoded(**text) for text in kept["texts"]])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent, of an earlier version or half a file: it is only made again
    reference = decode_reference(model, prompts, cfg, eos_ids)
    write_json(path, {"key": key, **asdict(reference)})
    return reference


def write_json(path: Path, value: Any, indent: int = 1) -> None:
    write_text_atomically(path, json.dumps(value, indent=indent) + "\n")
