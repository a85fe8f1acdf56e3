"""A frozen causal LM whose cache cannot take tokens back: linear attention, state spaces, convolutions, whatever has a state
that each token overwrites.

Such a state is kept by copying it. Before a block is verified, the whole cache is copied; afterwards the copy takes the
block's place, and the tokens that stay are run through it again, one at a time, which is what plain decoding does: every
tensor of the cache then has the bits that plain decoding gives it (a block goes through other kernels than a token, and
rounds differently). Nothing here knows what a family keeps in its cache.

Each sequence is run by itself, without padding, since a recurrent layer reads padding like any token, and since the number
of sequences in a batch may change the rounding.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from data_pipelines.engines.anatomy import tap_hidden_states
from data_pipelines.errors import UserError

from .target_cache import TargetStep

CACHE_NAMES = ("past_key_values", "cache_params")  # of the argument and of the output, by family


class ReplayedTarget:
    """The target and a cache of its own for every sequence. Used as `CachedTarget` is.

    stepwise: a block is verified token by token as well, for a family that does not continue its state over several.
    """

    def __init__(self, model: nn.Module, taps: tuple[int, ...] | None, *, stepwise: bool = False):
        self.model, self.tap_ids, self.stepwise = model, taps, stepwise
        self._accepts = set(inspect.signature(model.forward).parameters)
        self._cache_name = next((name for name in CACHE_NAMES if name in self._accepts), CACHE_NAMES[0])
        self.caches: list[Any] = []  # one a sequence
        self._before: list[tuple[Any, Tensor, Tensor]] | None = None  # cache, tokens and positions of a block to replay

    def forward(self, tokens: Tensor, positions: Tensor, valid: Tensor, *, only_last: bool = False) -> TargetStep:
        """tokens, positions [b, T]; valid bool [b, T] is False at padding, which is not run. The first call prefills."""
        starts = not self.caches
        caches = self.caches or [None] * len(tokens)
        self._before = None
        if not starts and tokens.shape[1] > 1:
            self._before = [(copy.deepcopy(cache), *rows) for cache, *rows in zip(caches, tokens, positions)]
        steps = []
        for row, cache in enumerate(caches):
            real = valid[row]
            one_by_one = self.stepwise and not starts
            step, cache = self._run(cache, tokens[row, real], positions[row, real], only_last, one_by_one)
            steps.append(_padded(step, real))
            caches[row] = cache
        self.caches = caches
        return _joined(steps, dim=0)

    def keep(self, step: TargetStep, valid: Tensor, sequences: Tensor) -> TargetStep:
        """Of the last T slots only those that are True in `valid` [b, T], a prefix of each row, stay; of the batch only
        `sequences` [b']. Returns the step with the features that those slots have in plain decoding."""
        kept = sequences.tolist()
        if self._before is not None:
            for row in kept:
                cache, tokens, positions = self._before[row]
                real = valid[row]
                replayed, self.caches[row] = self._run(cache, tokens[real], positions[real], False, one_by_one=True)
                if step.taps is not None:
                    step.taps[row, real], step.final[row, real] = replayed.taps[0], replayed.final[0]
        self._before = None
        self.caches = [self.caches[row] for row in kept]
        return step

    def _run(
        self, cache: Any, tokens: Tensor, positions: Tensor, only_last: bool, one_by_one: bool = False
    ) -> tuple[TargetStep, Any]:
        """tokens, positions [T] on top of `cache` (None: of nothing). Returns the step, with a batch of 1, and the cache."""
        steps = []
        for ids, places in zip(*((x.split(1) if one_by_one else (x,)) for x in (tokens, positions))):
            step, cache = self._call(cache, ids[None], places[None], only_last)
            steps.append(step)
        return _joined(steps), cache

    def _call(self, cache: Any, tokens: Tensor, positions: Tensor, only_last: bool) -> tuple[TargetStep, Any]:
        arguments = {"position_ids": positions, "use_cache": True, "logits_to_keep": 1 if only_last else 0}
        arguments = {name: value for name, value in arguments.items() if name in self._accepts}
        if cache is not None:
            arguments[self._cache_name] = cache
        if self.tap_ids is None:
            output, taps, final = self.model(tokens, **arguments), None, None
        else:
            with tap_hidden_states(self.model, self.tap_ids) as recorder:
                output = self.model(tokens, **arguments)
            taps, final = recorder.taps, recorder.final
        logits = output.logits[:, -1:] if only_last else output.logits
        if output.get(self._cache_name) is None:
            raise UserError("it gives no cache back", where=type(self.model).__name__)
        return TargetStep(logits, taps, final).to(tokens.device), output[self._cache_name]


def _joined(steps: Sequence[TargetStep], dim: int = 1) -> TargetStep:
    """Along the slots (dim 1) or the batch (dim 0)."""
    if len(steps) == 1:
        return steps[0]
    return TargetStep(*(None if parts[0] is None else torch.cat(parts, dim) for parts in zip(*map(_parts, steps))))


def _parts(step: TargetStep) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return step.logits, step.taps, step.final


def _padded(step: TargetStep, real: Tensor) -> TargetStep:
    """Features at the slots that are real (bool [T]), zeros at the others."""

    def spread(values: Tensor | None) -> Tensor | None:
        if values is None or bool(real.all()):
            return values
        out = values.new_zeros(1, len(real), *values.shape[2:])
        out[0, real] = values[0]
        return out

    return TargetStep(step.logits, spread(step.taps), spread(step.final))
