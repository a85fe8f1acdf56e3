"""What an engine is, and which there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..features import Features, FeatureSpec
from ..plugins import Registry

if TYPE_CHECKING:
    from .targets import Target


class Engine(Protocol):
    """Computes the features of packs. One pack is always computed in the same way, so that a recomputed pack is the same."""

    def compute(self, input_ids: np.ndarray, lengths: tuple[int, ...]) -> Features:
        """input_ids int32 [T]: documents of the given lengths laid end to end; none sees another."""
        ...


# name → build(Target, FeatureSpec, **target.options)
ENGINES: Registry[Callable[..., Engine]] = Registry("target.engine")


@ENGINES.register("transformers")
def _transformers(target: Target, spec: FeatureSpec) -> Engine:
    from .transformers import TransformersEngine

    return TransformersEngine(target, spec)
