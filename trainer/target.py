"""The target's own embedding, final norm and head, without its decoder layers: what a trainer needs of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from data_pipelines.engines import Target
from data_pipelines.engines.anatomy import anatomy
from data_pipelines.engines.readout import Readout, error_limit, measure_readout
from data_pipelines.errors import UserError


class FrozenTarget:
    """Frozen, never sharded with the drafter, never saved with it.

    The norm is the target family's own module, and the readout (scale, bias and soft-cap of the logits) is measured on the
    family's own forward. So the teacher is right without this project knowing the family.
    Raises UserError when the model's own logits are not explained by embedding, final norm and head.
    """

    def __init__(self, model: nn.Module):
        parts = anatomy(model)
        self._embedding, self._norm = parts.embedding, parts.final_norm
        self.readout, error = measure_readout(model)
        if error > error_limit(self.dtype):
            raise UserError(
                f"the logits of {type(model).__name__} are not those of its final norm and head: off by {error:.3g} of the "
                "largest",
                fix="this family does something between the two that is not supported; draftsmith check-target says more",
            )
        self._draft_readout: tuple[torch.Tensor, Readout] | None = None  # of the vocabulary asked for last

    @classmethod
    def load(cls, target: Target, dtype: torch.dtype, device: torch.device | str = "cpu") -> FrozenTarget:
        """Reads only the tensors that it needs."""
        return cls(target.load_tail(dtype).to(device))

    @property
    def embedding_weight(self) -> torch.Tensor:
        """[V, H]"""
        return self._embedding.weight

    @property
    def head_weight(self) -> torch.Tensor:
        """[V, H]"""
        return self.readout.weight

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.weight.dtype

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids [...] → rows of the embedding, [..., H].

        The plain rows, as engines embed for a drafter. What the family's model makes of them (Gemma multiplies by √H) is
        the model's own affair.
        """
        return F.embedding(tokens, self._embedding.weight)

    def normed(self, final: torch.Tensor) -> torch.Tensor:
        """H^L [..., H], before the final norm → g [..., H]."""
        return self._norm(final.to(self.dtype))

    def draft_readout(self, kept: torch.Tensor | None) -> Readout:
        """The readout of the draft vocabulary; the whole one when `kept` is None."""
        if kept is None:
            return self.readout
        if self._draft_readout is None or self._draft_readout[0] is not kept:
            self._draft_readout = (kept, self.readout.rows(kept))
        return self._draft_readout[1]

    def draft_head(self, kept: torch.Tensor | None) -> torch.Tensor:
        """The head's rows of the draft vocabulary, [D, H]; the whole head when `kept` is None."""
        return self.draft_readout(kept).weight
