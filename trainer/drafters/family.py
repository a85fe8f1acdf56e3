"""The target's own kind of decoder layer, from transformers, with attention that is handed in from outside.

q/k norms, biases, partial or scaled RoPE, soft-caps, sinks, mixtures of experts: all of it is the family's own code. Only
what a query may see is ours: transformers calls a registered attention function, and that one calls the strategy object
(`attention.RolloutAttention` and its like) which travels through the layer's keyword arguments.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from data_pipelines.engines.anatomy import anatomy
from data_pipelines.errors import UserError

from .attention import Scoring
from .layers import Rotary

IMPLEMENTATION = "draftsmith"
OTHERS = "choose drafter=eagle3, dflash or dspark: they have layers of their own"
_KINDS = ("layer_types", "layers_block_type")  # where configs say what each layer is
_FULL = ("full_attention", "attention")


def _attention(
    module, query, key, value, attention_mask, *, draft_attention=None, scaling=None, softcap=None, s_aux=None, **_
):
    """What transformers calls with query [B, heads, N, d], key and value [B, kv_heads, N, d]. Returns [B, N, heads, d].

    The strategy decides alone what is seen: a window that the family's layer asks for is not applied. (RoPE is in fp32, so
    that queries and keys may come wider than values.)
    """
    if draft_attention is None:
        raise ValueError("the layer does not hand on to its attention what it is called with")
    scoring = Scoring(scaling, softcap, s_aux)
    attended = draft_attention(query.to(value.dtype), key.to(value.dtype), value, scoring)
    return attended.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attention)


class Family:
    """The parts of a target that a drafter builds anew, with fresh weights as the family's own models begin.

    config: a copy of the target's text config, bound to this module's attention. index: the layer that is imitated, the
    last one with full attention and keys of its own (of a hybrid target, too: linear attention keeps no keys).
    mask: what a call of the layer is given as one, see `own_attention`.

    Raises UserError for a family that cannot be built, or that has no such layer.
    """

    mask: torch.Tensor | None = None

    def __init__(self, target_config):
        self.config = copy.deepcopy(target_config)
        self.config._attn_implementation = IMPLEMENTATION
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(self.config, attn_implementation=IMPLEMENTATION)
        self._parts = anatomy(self._model)
        depth = len(self._parts.layers)
        kinds = next((k for key in _KINDS if (k := getattr(self.config, key, None))), None) or [_FULL[0]] * depth
        own = depth - (getattr(self.config, "num_kv_shared_layers", None) or 0)  # the last ones may read others' keys
        full = [i for i, kind in enumerate(kinds[:own]) if kind in _FULL]
        rotary = getattr(self._parts.decoder, "rotary_emb", None)
        if not full or rotary is None:
            raise UserError(
                f"a {self.config.model_type} target has no layer with full attention and rotary positions to imitate",
                fix=OTHERS,
            )
        self.index = full[-1]
        self.layer_class = type(self._parts.layers[self.index])
        self._shares = "shared_kv_states" in inspect.signature(self.layer_class.forward).parameters

    def layer_arguments(self) -> dict[str, Any]:
        """What a call of the layer takes beside states, positions and what is seen."""
        return {"shared_kv_states": {}} if self._shares else {}

    @contextmanager
    def own_attention(self, rows: torch.Tensor) -> Iterator[None]:
        """Inside, its layers attend by transformers' own code, causally over so many rows."""
        causal = rows[:, None] >= rows
        self.mask = torch.where(causal, 0.0, torch.finfo(torch.float32).min)[None, None]
        self.config._attn_implementation = "eager"
        try:
            yield
        finally:
            self.mask, self.config._attn_implementation = None, IMPLEMENTATION

    def norm(self) -> nn.Module:
        """One like the final norm."""
        return copy.deepcopy(self._parts.final_norm).to_empty(device="cpu")

    def rotary(self) -> Rotary:
        arguments = {}
        embedding = self._parts.decoder.rotary_emb
        if "layer_type" in inspect.signature(embedding.forward).parameters:  # a theta for each kind of layer
            arguments["layer_type"] = "full_attention"
        return Rotary(embedding=type(embedding)(self.config), **arguments)

    @torch.no_grad()
    def initialise(self, module: nn.Module) -> None:
        """The family's own initialisation of every part of `module`, from torch's global generator."""
        for part in module.modules():
            if not isinstance(part, Rotary):
                self._model._init_weights(part)
