"""The frozen target: what it is (`targets`), where its parts are (`anatomy`), how its features are computed (engines)."""

from __future__ import annotations

import os
from typing import Protocol

import numpy as np

from ..errors import UserError
from ..features import Features, FeatureSpec
from .targets import Target, TargetConfig, resolve_dtype, resolve_target

__all__ = ["Engine", "Target", "TargetConfig", "build_engine", "resolve_dtype", "resolve_target"]

# oneDNN keeps what it has prepared for a shape; the default, 1024 of them, is more than a gigabyte where every pack has a
# length of its own. Read when the first is made, so that it can be set here for every process that computes.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


class Engine(Protocol):
    """Computes the features of packs. One pack is always computed in the same way, so that a recomputed pack is the same."""

    def compute(self, input_ids: np.ndarray, lengths: tuple[int, ...]) -> Features:
        """input_ids int32 [T]: documents of the given lengths laid end to end; none sees another."""
        ...


def build_engine(target: Target, spec: FeatureSpec) -> Engine:
    if spec.engine != "transformers":
        raise UserError(f"engine '{spec.engine}' is not one of transformers")
    from .transformers import TransformersEngine

    return TransformersEngine(target, spec)
