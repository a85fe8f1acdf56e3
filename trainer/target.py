"""The target's own embedding, final norm and head, without its decoder layers: what a trainer needs of it."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from data_pipelines.engines import Target
from data_pipelines.engines.anatomy import anatomy, text_config
from data_pipelines.errors import UserError


class FrozenTarget:
    """Frozen, never sharded with the drafter, never saved with it.

    The modules are the target family's own, so that a norm which scales by (1 + w), a scaled embedding or a logit soft-cap
    is right without this project knowing of it.
    """

    def __init__(self, model: nn.Module):
        parts = anatomy(model)
        self._embedding, self._norm, self._head, self._softcap = (
            parts.embedding,
            parts.final_norm,
            parts.head,
            parts.softcap,
        )
        self._draft_head: tuple[torch.Tensor, torch.Tensor] | None = None  # of the vocabulary asked for last

    @classmethod
    def load(cls, target: Target, dtype: torch.dtype, device: torch.device | str = "cpu") -> FrozenTarget:
        """Reads only the tensors that it needs: the model is built with no decoder layer, and transformers' own loader
        handles tied heads, sharded files and nested or renamed keys."""
        config = AutoConfig.from_pretrained(target.path)
        text = text_config(config)
        text.num_hidden_layers = 0
        if getattr(text, "layer_types", None):
            text.layer_types = []
        verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()  # the decoder layers' keys are unexpected, on purpose
        transformers_logging.disable_progress_bar()
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                target.path, config=config, dtype=dtype, output_loading_info=True
            )
        finally:
            transformers_logging.set_verbosity(verbosity)
        if info["missing_keys"]:
            raise UserError(f"the target's checkpoint lacks {sorted(info['missing_keys'])}", where=target.path)
        return cls(model.eval().requires_grad_(False).to(device))

    @property
    def embedding_weight(self) -> torch.Tensor:
        """[V, H]"""
        return self._embedding.weight

    @property
    def head_weight(self) -> torch.Tensor:
        """[V, H]"""
        return self._head.weight

    @property
    def dtype(self) -> torch.dtype:
        return self._head.weight.dtype

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids [...] → [..., H]."""
        return self._embedding(tokens)

    def normed(self, final: torch.Tensor) -> torch.Tensor:
        """H^L [..., H], before the final norm → g [..., H]."""
        return self._norm(final.to(self.dtype))

    def draft_head(self, kept: torch.Tensor | None) -> torch.Tensor:
        """The head's rows of the draft vocabulary, [D, H]; the whole head when `kept` is None."""
        if kept is None:
            return self.head_weight
        if self._draft_head is None or self._draft_head[0] is not kept:
            self._draft_head = (kept, self.head_weight[kept])
        return self._draft_head[1]

    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        """The target's logit soft-cap, if it has one."""
        return logits if not self._softcap else self._softcap * torch.tanh(logits / self._softcap)
