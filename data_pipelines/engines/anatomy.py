"""Where the parts of a causal LM are, whatever its family calls them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import UserError


@dataclass(frozen=True)
class Anatomy:
    """decoder: the module that maps token ids to final hidden states. layers: its decoder layers, in order."""

    decoder: nn.Module
    layers: nn.ModuleList
    final_norm: nn.Module
    embedding: nn.Module
    head: nn.Module
    softcap: float | None


def anatomy(model: nn.Module) -> Anatomy:
    """The parts of a transformers causal LM (also of the text model inside a multimodal one).

    Raises UserError for an architecture in which they cannot be told.
    """
    decoder = model.base_model
    for nested in ("language_model", "text_model"):
        decoder = getattr(decoder, nested, decoder)
    layers = next((m for n in ("layers", "h") if isinstance(m := getattr(decoder, n, None), nn.ModuleList)), None)
    names = ("norm", "final_layernorm", "ln_f", "final_layer_norm")
    final_norm = next((m for n in names if isinstance(m := getattr(decoder, n, None), nn.Module)), None)
    head = model.get_output_embeddings()
    if layers is None or final_norm is None or head is None:
        raise UserError(
            f"cannot find the decoder layers, the final norm and the head of {type(model).__name__}",
            fix="the target must be a decoder-only causal LM of transformers",
        )
    softcap = getattr(text_config(model.config), "final_logit_softcapping", None)
    return Anatomy(decoder, layers, final_norm, model.get_input_embeddings(), head, softcap)


def text_config(config):
    """The language model's own config, which multimodal targets nest."""
    return config.get_text_config(decoder=True)


class Recorder:
    """Hidden states of the latest forward: `taps` [B, T, A, H] and `final` [B, T, H], the state before the final norm."""

    def __init__(self, taps: tuple[int, ...]):
        self._taps, self._states = taps, {}

    def _keep(self, k: int, hidden: torch.Tensor) -> None:
        self._states[k] = hidden

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
