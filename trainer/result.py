"""What the trainer says of a finished run: `training.json`."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from data_pipelines.files import write_text_atomically

from .parallel import Strategy, World
from .setup import RunSetup
from .tracking import read_metrics


def weights_sha256(state: dict[str, torch.Tensor]) -> str:
    """Over names, shapes and bytes of all tensors: equal iff the weights are bit-identical."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.view(torch.uint8).numpy())
    return digest.hexdigest()


_MOST_STEPS_OF_A_MEAN = 20


def mean_losses(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """first and last: the mean loss over the first and over the last tenth of the steps (20 at most) that trained
    something; one step's is noise. None if no step trained anything."""
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    size = min(max(1, len(losses) // 10), _MOST_STEPS_OF_A_MEAN)
    first, last = losses[:size], losses[-size:]
    return {"first": sum(first) / size if first else None, "last": sum(last) / size if last else None}


def trained_share(rows: list[dict[str, Any]]) -> float | None:
    """The share of the drafts that count, over all steps, that were trained; None if none counts."""
    drafts = sum(row["drafts"] for row in rows)
    return sum(row["drafts"] * (row["trained_share"] or 0.0) for row in rows) / drafts if drafts else None


def write_result(setup: RunSetup, strategy: Strategy, world: World) -> None:
    """All ranks call it (the weights are gathered); rank 0 writes. Sums come from metrics.jsonl, hence over resumptions."""
    state = strategy.full_weights()
    if world.rank != 0:
        return
    rows = read_metrics(setup.run_dir)
    seconds, tokens = sum(r["seconds"] for r in rows), sum(r["tokens"] for r in rows)
    result = {
        "world_size": world.size,
        "steps": setup.total_steps,
        "packs": sum(r["packs"] for r in rows),
        "tokens": tokens,
        "supervised_tokens": sum(r["supervised_tokens"] for r in rows),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "wait_fraction": sum(r["wait_seconds"] for r in rows) / seconds,
        "loss": mean_losses(rows),
        "trained_share": trained_share(rows),
        "weights_sha256": weights_sha256(state),
        "parameters": sum(p.numel() for name, p in state.items() if p.is_floating_point()),
    }
    write_text_atomically(setup.folder.training, json.dumps(result, indent=2) + "\n")
