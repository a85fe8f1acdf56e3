"""Where the parts of a causal LM are, whatever its family calls them.

Parts are found by structure, not by family, so a finding can be wrong. `probe` compares it with the model's own logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import UserError

_FINAL_NORMS = ("norm", "final_layernorm", "ln_f", "final_layer_norm", "norm_f")


@dataclass(frozen=True)
class Anatomy:
    """decoder: the module that maps token ids to final hidden states. layers: its decoder layers, in order."""

    decoder: nn.Module
    layers: nn.ModuleList
    final_norm: nn.Module
    embedding: nn.Module
    head: nn.Module


def anatomy(model: nn.Module) -> Anatomy:
    """The parts of a transformers causal LM (also of the text model inside a multimodal one).

    Raises UserError for an architecture in which they cannot be told.
    """
    embedding, head = _own_or_nested(model, "get_input_embeddings"), _own_or_nested(model, "get_output_embeddings")
    found = _decoder(model, embedding)
    final_norm = found and _final_norm(found[0])
    missing = [
        name
        for name, part in (
            ("embedding", embedding),
            ("decoder layers", found),
            ("final norm", final_norm),
            ("head", head),
        )
        if part is None
    ]
    if missing:
        raise UserError(
            f"cannot find the {' and the '.join(missing)} of {type(model).__name__}",
            fix="the target must be a decoder-only causal LM of transformers",
        )
    decoder, layers = found
    return Anatomy(decoder, layers, final_norm, embedding, head)


def _own_or_nested(model: nn.Module, getter: str) -> nn.Module | None:
    """What a model says of itself, or else the first model inside it that says something (a wrapper may not know)."""
    for part in model.modules():
        try:
            found = getattr(part, getter)()
        except (NotImplementedError, AttributeError):  # a family without such a part
            continue
        if found is not None and (part is model or isinstance(found, nn.Embedding | nn.Linear)):
            return found
    return None


def _decoder(model: nn.Module, embedding: nn.Module | None) -> tuple[nn.Module, nn.ModuleList] | None:
    """The module that owns as many layers as the text config says, and its list of them. Other towers may have as many:
    the decoder is the innermost one that holds the embedding, or else the outermost."""
    depth = getattr(text_config(model.config), "num_hidden_layers", None)
    owners = []
    for module in model.modules():
        lists = [m for m in module.children() if isinstance(m, nn.ModuleList) and len(m) == depth]
        if lists:
            owners.append((module, lists[0]))
    holding = [
        (m, layers) for m, layers in owners if embedding is not None and any(x is embedding for x in m.modules())
    ]
    return holding[-1] if holding else next(iter(owners), None)


def _final_norm(decoder: nn.Module) -> nn.Module | None:
    children = dict(decoder.named_children())
    named = next((children[name] for name in _FINAL_NORMS if name in children), None)
    norms = [module for module in children.values() if "norm" in type(module).__name__.lower()]
    return named or (norms[-1] if norms else None)


def text_config(config):
    """The language model's own config, which multimodal targets nest."""
    return config.get_text_config(decoder=True)


def length_limit(config) -> int | None:
    """The number of tokens from which RoPE factors of a whole row may change with its longest text (dynamic NTK, LongRoPE);
    None where they never do."""
    ropes = [rope for rope in _ropes(text_config(config)) if rope.get("rope_type") in ("dynamic", "longrope")]
    if not ropes:
        return None
    inner = text_config(config)
    lengths = [
        rope.get("original_max_position_embeddings")
        or getattr(inner, "original_max_position_embeddings", None)
        or inner.max_position_embeddings
        for rope in ropes
    ]
    return min(lengths)


def _ropes(config) -> list[dict]:
    """The RoPE parameters of a text config: one set, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]


class Recorder:
    """Hidden states of the latest forward: `taps` [B, T, A, H] and `final` [B, T, H], the state before the final norm."""

    def __init__(self, taps: tuple[int, ...]):
        self._taps, self._states = taps, {}

    def _keep(self, k: int, hidden: torch.Tensor) -> None:
        self._states[k] = hidden

    def state(self, k: int) -> torch.Tensor:
        """H^k, as the family has it."""
        return self._states[k]

    @property
    def taps(self) -> torch.Tensor:
        if not self._taps:
            return self.final.new_empty(*self.final.shape[:2], 0, self.final.shape[-1])
        device = self.final.device  # layers may lie on several
        return torch.stack([self._states[k].to(device) for k in self._taps], dim=2)

    @property
    def final(self) -> torch.Tensor:
        return self._states["final"]


@contextmanager
def tap_hidden_states(model: nn.Module, taps: tuple[int, ...]) -> Iterator[Recorder]:
    """Record H^k for every k of `taps` while the context lasts.

    H^k is the residual stream after k decoder layers: the input of layer k, or for k = L that of the final norm. (The
    `hidden_states` that transformers returns hold the *normed* state in last place.)
    """
    parts = anatomy(model)
    depth = len(parts.layers)
    if any(not 0 <= k <= depth for k in taps):
        raise UserError(f"taps {list(taps)} of a target with {depth} layers", fix=f"tap ids lie in 0…{depth}")
    recorder = Recorder(taps)
    handles = []

    def watch(module: nn.Module, *ids) -> None:
        def hook(_, args, kwargs):
            hidden = args[0] if args else kwargs["hidden_states"]
            for k in ids:
                recorder._keep(k, hidden)

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    for k in sorted({k for k in taps if k < depth}):
        watch(parts.layers[k], k)
    watch(parts.final_norm, "final", depth)
    try:
        yield recorder
    finally:
        for handle in handles:
            handle.remove()
