"""The target's own kind of decoder layer, from transformers, with attention that is handed in from outside.

q/k norms, biases, partial or scaled RoPE, soft-caps, sinks, mixtures of experts: all of it is the family's own code. Only
what a query may see is ours: transformers calls a registered attention function, and that one calls the strategy object
(`attention.RolloutAttention` and its like) which travels through the layer's keyword arguments.
"""

from __future__ import annotations

import copy
import inspect

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from data_pipelines.engines.anatomy import anatomy
from data_pipelines.errors import UserError

from .attention import Scoring
from .layers import Rotary

IMPLEMENTATION = "draftsmith"


def _attention(
    module, query, key, value, attention_mask, *, draft_attention, scaling=None, softcap=None, s_aux=None, **_
):
    """What transformers calls with query [B, heads, N, d], key and value [B, kv_heads, N, d]. Returns [B, N, heads, d].

    The strategy decides alone what is seen: a window that the family's layer asks for is not applied. (RoPE is in fp32, so
    that queries and keys may come wider than values.)
    """
    scoring = Scoring(scaling, softcap, s_aux)
    attended = draft_attention(query.to(value.dtype), key.to(value.dtype), value, scoring)
    return attended.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attention)


class Family:
    """The parts of a target that a drafter builds anew, with fresh weights as the family's own models begin.

    config: a copy of the target's text config, bound to this module's attention. index: the layer that is imitated, the
    last one with full attention.
    """

    def __init__(self, target_config):
        self.config = copy.deepcopy(target_config)
        self.config._attn_implementation = IMPLEMENTATION
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(self.config, attn_implementation=IMPLEMENTATION)
        self._parts = anatomy(self._model)
        kinds = getattr(self.config, "layer_types", None) or ["full_attention"] * len(self._parts.layers)
        full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        rotary = getattr(self._parts.decoder, "rotary_emb", None)
        if not full or rotary is None:
            raise UserError(
                f"a {self.config.model_type} target has no layer with full attention and rotary positions to imitate",
                fix="choose another drafter for this target",
            )
        self.index = full[-1]
        self.layer_class = type(self._parts.layers[self.index])

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
