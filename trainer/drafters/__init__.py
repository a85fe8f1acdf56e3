"""The drafters, one file each. Adding one is one file and one line here, or a plug-in (docs/extending.md)."""

from __future__ import annotations

import torch

from data_pipelines.plugins import Registry

from .base import Committed, Contract, Drafter, DrafterConfig
from .dflash import DFlash
from .dspark import DSpark
from .eagle3 import Eagle3
from .mtp import MTP

DRAFTERS: Registry[type[Drafter]] = Registry(
    "drafter", {"dflash": DFlash, "dspark": DSpark, "eagle3": Eagle3, "mtp": MTP}
)

__all__ = ["DRAFTERS", "Committed", "Contract", "Drafter", "DrafterConfig", "build_drafter"]


def build_drafter(config: DrafterConfig, target_config, kept: torch.Tensor | None) -> Drafter:
    """A drafter with fresh weights (from torch's global generator) for a target with that text config.

    kept: int64 [D], the target ids of the draft vocabulary, ascending; None for the whole vocabulary.
    """
    return DRAFTERS[config.name](config, target_config, kept)
