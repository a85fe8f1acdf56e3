"""What decides the weights of a run, and what of it may differ when the run is resumed."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from data_pipelines.engines import resolve_dtype
from data_pipelines.errors import UserError, did_you_mean

from .checkpoint import Changes
from .config import RunConfig, all_keys

# What is free to differ between a run and its resumption: none of it decides which weights come out.
_FREE = {"run_dir", "recipe", "resume", "allow", "plugins"}
_FREE_KEYS = {"data.workers", "data.streaming", "data.max_quarantined_fraction"}
_FREE_GROUPS = {"source", "store", "tracker", "cluster", "checkpoint", "evaluate", "export"}
# How long a run is and in which precision it computes: a checkpoint can go on under another value, if that is wanted.
_CHANGEABLE = {"epochs", "max_steps", "parallel.compute_dtype"}
# These decide how many numbers a step has in metrics.jsonl, or how fresh weights begin.
_FIXED_TRAINING = {"steps", "warm_start"}


def run_identity(config: RunConfig, *, plan: str, target: str, dtype: str) -> dict[str, Any]:
    """plan: the fingerprint of the packs. target: its fingerprint, which says which it is, wherever it lies. dtype: of the
    features."""
    flat: dict[str, Any] = {"plan": plan, "target": target}
    for key, value in asdict(config).items():
        if key in _FREE or key in _FREE_GROUPS:
            continue
        if key == "parallel":  # in which mode and on how many ranks is free; in which precision is not
            flat["parallel.compute_dtype"] = str(resolve_dtype(value["compute_dtype"]))
        elif key == "target":
            flat["target.dtype"] = dtype
            flat["target.engine"] = value["engine"]
        elif isinstance(value, dict):
            flat.update({f"{key}.{name}": v for name, v in value.items()})
        else:
            flat[key] = value
    for key in _FREE_KEYS:
        del flat[key]
    return json.loads(json.dumps(flat))


def changes(config: RunConfig) -> Changes:
    """Raises UserError when `allow` names a key that must not differ, or none at all."""
    optim = {f"optim.{name}" for name in asdict(config.optim)}
    training = {f"drafter.{name}" for name in config.drafter.training - _FIXED_TRAINING}
    possible = _CHANGEABLE | optim | training
    for key in config.allow:
        if key not in possible:
            meant = None if key in all_keys(config.drafter.name) else did_you_mean(key, possible)
            raise UserError(
                f"allow=[{key}]: a run cannot go on with another {key}",
                fix=f"{meant or 'start anew with resume=never or another run_dir'} "
                f"(what may differ: {', '.join(sorted(possible))})",
            )
    return Changes(frozenset(config.allow), frozenset(possible))
