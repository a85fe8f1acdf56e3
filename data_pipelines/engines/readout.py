"""How a target turns its normed final state into logits: read off the model's own forward, not off a list of families.

Families scale their logits (Granite, Cohere, Falcon-H1), cap them (Gemma 2), or add a bias (Phi). The same config key
multiplies in one family and divides in another. So the scale and the cap are measured, and then taken from the config,
which has the exact numbers.

Letters: n rows, H width, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PretrainedConfig

from ..errors import UserError
from .anatomy import anatomy, tap_hidden_states, text_config

_PROBE_TOKENS = 12


@dataclass(frozen=True, eq=False)
class Readout:
    """logits = cap(scale · (W g + b)), with cap(x) = softcap · tanh(x / softcap).

    weight: W [V, H], or some of its rows. bias: b, one number a row, or None. softcap: None for no cap.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def rows(self, kept: torch.Tensor | None) -> Readout:
        """The readout of some tokens, int64 [D]; of all of them for None."""
        if kept is None:
            return self
        return replace(self, weight=self.weight[kept], bias=None if self.bias is None else self.bias[kept])

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """g [n, H] → [n, V], in float32 at least. The product itself is in the dtype of the weights."""
        product = normed @ self.weight.T
        return self.finish(product if product.dtype == torch.float64 else product.float())

    def finish(self, product: torch.Tensor) -> torch.Tensor:
        """W g [n, V] → logits."""
        if self.bias is not None:
            product = product + self.bias.to(product.dtype)
        if self.scale != 1.0:
            product = product * self.scale
        return product if self.softcap is None else self.softcap * torch.tanh(product / self.softcap)


@torch.no_grad()
def measure_readout(model: nn.Module) -> tuple[Readout, float]:
    """The readout that explains the model's own logits on random tokens, and the largest difference that is left, as a
    share of the largest logit. (`error_limit` says what rounding explains.)

    model: a causal LM of transformers; it may have lost its decoder layers. Raises UserError if it has no plain head.
    """
    parts, config = anatomy(model), text_config(model.config)
    weight, bias = getattr(parts.head, "weight", None), getattr(parts.head, "bias", None)
    if weight is None or not weight.is_floating_point() or weight.dim() != 2:
        raise UserError(
            f"the head of {type(model).__name__} is a {type(parts.head).__name__} without a matrix of floats",
            fix="quantised heads are not supported: use a checkpoint whose head is not quantised",
        )
    with tap_hidden_states(model, ()) as recorder:
        real = model(input_ids=random_tokens(model, _PROBE_TOKENS), use_cache=False).logits[0]
    plain = Readout(weight, bias)
    g = parts.final_norm(recorder.final)[0].to(weight.dtype)
    if g.shape[-1] != weight.shape[1] or real.shape[-1] != len(weight):
        raise UserError(
            f"the head of {type(model).__name__} reads {weight.shape[1]} numbers, the final norm gives {g.shape[-1]}",
            fix="this family changes the state between its final norm and its head; it is not supported",
        )
    product, real = plain.logits(g), real.float()
    fits = []
    for softcap in [None, *_softcaps(config)]:
        scale = _scale(product, real, softcap, config)
        candidate = replace(plain, scale=scale, softcap=softcap)
        fits.append((relative_error(replace(candidate, bias=None).finish(product), real), candidate))
    error, best = min(fits, key=lambda fit: fit[0])
    declared = fits[-1]  # where a cap cannot be told from none on these tokens, it is taken as the config declares it
    return (declared[1], declared[0]) if declared[0] <= max(error, error_limit(weight.dtype)) else (best, error)


def relative_error(ours: torch.Tensor, real: torch.Tensor) -> float:
    """The largest difference, as a share of the largest entry of `real`."""
    return float((ours - real).abs().max() / real.abs().max().clamp(min=1e-12))


def error_limit(dtype: torch.dtype) -> float:
    """A relative error that rounding alone explains: 1e-5 in float32, 0.02 in bfloat16."""
    return max(1e-5, 2.5 * torch.finfo(dtype).eps)


def random_tokens(model: nn.Module, n: int, seed: int = 0) -> torch.Tensor:
    """Token ids [1, n] that mean nothing special to the model: no placeholder for an image, no padding."""
    special = {v for k, v in _numbers(model.config) if re.search(r"token_(id|index)$", k)}
    size = anatomy(model).embedding.weight.shape[0]
    ids = [i for i in range(size) if i not in special] or list(range(size))
    drawn = torch.randint(len(ids), (n,), generator=torch.Generator().manual_seed(seed))
    return torch.tensor([[ids[i] for i in drawn.tolist()]], device=next(model.parameters()).device)


def _scale(product: torch.Tensor, real: torch.Tensor, softcap: float | None, config) -> float:
    """The factor between the two by least squares, as the number in the config that it must be."""
    clear = torch.ones_like(real, dtype=torch.bool)
    if softcap is not None:
        clear = real.abs() < 0.9 * softcap  # further out the cap has swallowed what is to be measured
        real = softcap * torch.atanh((real / softcap).clamp(-0.95, 0.95))
    measured = float((product * real)[clear].sum() / product[clear].square().sum().clamp(min=1e-12))
    known = [1.0, *(x for _, value in _numbers(config) if value for x in (value, 1 / value))]
    nearest = min(known, key=lambda x: abs(x - measured))
    return nearest if math.isclose(nearest, measured, rel_tol=0.02) else measured


def _softcaps(config) -> list[float]:
    found = {v for k, v in _numbers(config) if re.search(r"soft_?cap", k) and "attn" not in k and "attention" not in k}
    return sorted(v for v in found if v > 0)


def _numbers(config) -> Iterator[tuple[str, float]]:
    """Every number in a config, nested configs and properties included, with its key."""

    def walk(node: dict) -> Iterator[tuple[str, float]]:
        for key, value in node.items():
            if isinstance(value, dict):
                yield from walk(value)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                yield str(key), value

    yield from walk(config.to_dict())
    own = {name for name in dir(type(config)) if isinstance(getattr(type(config), name, None), property)}
    derived = own - {*dir(PretrainedConfig)}
    yield from walk({name: getattr(config, name, None) for name in derived})
