"""The frozen target: what it is (`targets`), where its parts are (`anatomy`), how its features are computed (engines)."""

from __future__ import annotations

import os
from typing import Any

from ..features import FeatureSpec
from .engine import ENGINES, Engine
from .targets import Target, TargetConfig, resolve_dtype, resolve_target

__all__ = ["ENGINES", "Engine", "Target", "TargetConfig", "build_engine", "resolve_dtype", "resolve_target"]

# oneDNN keeps what it has prepared for a shape; the default, 1024 of them, is more than a gigabyte where every pack has a
# length of its own. Read when the first is made, so that it can be set here for every process that computes.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


def build_engine(target: Target, spec: FeatureSpec, options: dict[str, Any] | None = None) -> Engine:
    """The engine that `spec` names. options: `target.options`, its keyword arguments."""
    return ENGINES.choose(spec.engine)(target, spec, **(options or {}))
