"""Which way of decoding a target speculatively gives the target's own logits: found out by trying, not by its family.

Letters: b sequences, T slots, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from data_pipelines.engines.anatomy import text_config
from data_pipelines.errors import UserError

from .replay import ReplayedTarget
from .target_cache import CachedTarget

Judge = Callable[[nn.Module, tuple[int, ...] | None], Any]  # → CachedTarget or ReplayedTarget
BATCHED = "one cache"
WAYS: dict[str, Judge] = {
    BATCHED: CachedTarget,  # attention only: slots are masked and dropped, all sequences in one batch
    "replayed state": ReplayedTarget,
    "replayed state, token by token": partial(ReplayedTarget, stepwise=True),
}
PROMPTS, BLOCK, NEXT = (6, 3), 4, 3  # tokens of the trial: of two prompts, of a block, of another one
_found: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


class NotJudged(UserError):
    """This drafter cannot be judged here, and why. A run trains all the same, and says so."""


def find_way(model: nn.Module) -> str:
    """The first of WAYS whose logits, after a rejection, are those of an uncached forward. Tried once per model.

    Raises NotJudged if there is none.
    """
    if model not in _found:
        failures = []
        for name in list(WAYS) if attends_only(model) else list(WAYS)[1:]:
            reason = try_way(model, WAYS[name])
            if reason is None:
                _found[model] = name
                break
            failures.append(f"{name}: {reason}")
        else:
            raise NotJudged(
                f"no way to decode {type(model).__name__} speculatively gives its own logits ({'; '.join(failures)})",
                fix="judge this target with an engine that supports it",
            )
    return _found[model]


def cached_target(model: nn.Module, taps: tuple[int, ...] | None) -> CachedTarget | ReplayedTarget:
    return WAYS[find_way(model)](model, taps)


def attends_only(model: nn.Module) -> bool:
    """Whether all that the model keeps of a text is keys and values of each token, so that a token can be taken back."""
    if getattr(model, "_is_stateful", False):
        return False
    try:
        layers = DynamicCache(config=text_config(model.config)).layers
    except (AttributeError, KeyError, TypeError, ValueError):  # a kind of layer that has no cache of transformers' own
        return False
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


@torch.no_grad()
def try_way(model: nn.Module, judge: Judge) -> str | None:
    """Why `judge` does not decode this target as an uncached forward does; None if it does.

    Tried with two prompts of different lengths, a block of which they keep one token and all, and one more block, whose
    logits [T, V] are compared."""
    device = next(model.parameters()).device
    vocabulary = min(text_config(model.config).vocab_size, 1000)
    width, slots = max(PROMPTS), torch.arange(BLOCK, device=device)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (len(PROMPTS), width + BLOCK + NEXT), generator=draw).to(device)
    prompt, block, after = ids.split([width, BLOCK, NEXT], 1)
    lengths = torch.tensor(PROMPTS, device=device)
    positions = torch.arange(width, device=device) - (width - lengths)[:, None]
    kept = slots < torch.tensor([[1], [BLOCK]], device=device)
    everything, both = torch.ones_like(block, dtype=torch.bool), torch.arange(len(PROMPTS), device=device)
    try:
        target = judge(model, None)
        step = target.forward(prompt, positions.clamp(min=0), positions >= 0, only_last=True)
        target.keep(step, positions >= 0, both)
        step = target.forward(block, lengths[:, None] + slots, everything)
        target.keep(step, kept, both)
        lengths = lengths + kept.sum(1)
        step = target.forward(after, lengths[:, None] + slots[:NEXT], everything[:, :NEXT])
        for row, logits in enumerate(step.logits):
            text = torch.cat([prompt[row, positions[row] >= 0], block[row, kept[row]], after[row]])
            apart = _distance(logits, _uncached(model, text)[-NEXT:])
            if not apart <= (1e-2 if logits.dtype == torch.float32 else 0.3):
                return f"logits off by {apart:.1%}"
    except UserError as error:
        return error.what
    except Exception as error:  # whatever a family's code raises: the next way may do
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
    return None


def _uncached(model: nn.Module, text: Tensor) -> Tensor:
    """[T] → [T, V]"""
    arguments = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return model(text[None], **arguments).logits[0]


def _distance(logits: Tensor, expected: Tensor) -> float:
    """Of [T, V] from the expected ones, as a share of how far those are from their mean."""
    expected = expected.double()
    spread = (expected - expected.mean(-1, keepdim=True)).norm()
    return float((logits.double() - expected).norm() / spread)
