"""A run's checkpoint → its export."""

from __future__ import annotations

from pathlib import Path

import torch

from data_pipelines.errors import UserError

from ..checkpoint import find_checkpoint, load_weights
from ..drafters import Drafter
from ..setup import RunSetup
from ..target import FrozenTarget
from .speculators import export_drafter
from .stitch import stitch


def export_run(setup: RunSetup, *, step: int | None = None, out: Path | None = None) -> Path:
    """Export a checkpoint (default: the run's newest whole one) to `out` (default: `<run_dir>/export`), in one process.

    The number of tokens that engines draft a round by default is the number of draft steps that were trained.
    Raises UserError when there is no whole checkpoint.
    """
    drafter, frozen = _trained(setup, step)
    out = out or setup.folder.export
    return export_drafter(drafter, frozen, setup.target, setup.config.export, out, speculative_tokens=drafter.depth)


def stitch_run(setup: RunSetup, out: Path, *, step: int | None = None) -> Path:
    """A copy of the target's own checkpoint with its MTP head replaced by the run's. See `stitch` for what it refuses."""
    if setup.config.drafter.name != "mtp":
        raise UserError(f"--stitch puts an MTP head into its target; this run trained {setup.config.drafter.name}")
    return stitch(_trained(setup, step)[0], setup.target, out)


def _trained(setup: RunSetup, step: int | None) -> tuple[Drafter, FrozenTarget]:
    checkpoint = find_checkpoint(setup.run_dir, step)
    frozen = FrozenTarget.load(setup.target, torch.float32)
    drafter = setup.build_drafter(frozen)
    load_weights(checkpoint, drafter)
    return drafter, frozen
