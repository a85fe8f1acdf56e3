"""A run's checkpoint → its export."""

from __future__ import annotations

from pathlib import Path

import torch

from data_pipelines.errors import UserError

from ..checkpoint import load_checkpoint, whole_checkpoints
from ..config import RunConfig
from ..setup import prepare_run
from ..target import FrozenTarget
from .speculators import export_drafter


def export_run(config: RunConfig, run_dir: Path, *, checkpoint: Path | None = None, out: Path | None = None) -> Path:
    """Export a checkpoint (default: the run's newest whole one) to `out` (default: `<run_dir>/export`), in one process.

    The number of tokens that engines draft a round by default is the number of draft steps that were trained.
    Raises UserError when there is no whole checkpoint.
    """
    whole = whole_checkpoints(Path(run_dir) / "checkpoints")
    if checkpoint is None and not whole:
        raise UserError("there is no whole checkpoint to export", where=str(run_dir), fix="train first")
    setup = prepare_run(config)
    frozen = FrozenTarget.load(setup.target, torch.float32)
    drafter = setup.build_drafter(frozen)
    load_checkpoint(checkpoint or whole[-1], drafter)
    return export_drafter(
        drafter, frozen, setup.target, config.export, out or Path(run_dir) / "export", speculative_tokens=drafter.depth
    )
