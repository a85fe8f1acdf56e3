"""A frozen causal LM, asked several tokens at a time, for a batch whose sequences accept different numbers of them.

Letters: b sequences, T slots of one call, S slots in the cache, A taps, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from data_pipelines.engines.anatomy import tap_hidden_states

from ..drafters.attention import gather_slots, rightmost


@dataclass(frozen=True, eq=False)
class TargetStep:
    """logits [b, T, V] (or [b, 1, V] after a prefill); taps [b, T, A, H] and final [b, T, H], None when nobody taps."""

    logits: Tensor
    taps: Tensor | None
    final: Tensor | None

    def to(self, device: torch.device) -> TargetStep:
        """The layers of a large target lie on several."""
        parts = (self.logits, self.taps, self.final)
        return TargetStep(*(None if part is None else part.to(device) for part in parts))


class CachedTarget:
    """A target that keeps nothing but keys and values of each token, and its cache. Every sequence has a boolean mask over
    the slots of the cache, so that padding and rejected drafts are never attended to, and positions are always explicit.

    `keep` moves the slots that stay to the right end. Slots are then in the order of positions without holes, which
    makes a sliding window, counted in slots by transformers, a window of positions.
    """

    def __init__(self, model: nn.Module, taps: tuple[int, ...] | None):
        self.model, self.tap_ids = model, taps
        # Without a config every layer keeps everything; a sliding one would forget slots that a rejection brings back.
        self.cache = DynamicCache()
        self.slots: Tensor | None = None  # bool [b, S]: what may be attended to

    def forward(self, tokens: Tensor, positions: Tensor, valid: Tensor, *, only_last: bool = False) -> TargetStep:
        """Appends T slots. tokens, positions [b, T]; valid bool [b, T] is False at padding."""
        self.slots = valid if self.slots is None else torch.cat([self.slots, valid], dim=1)
        arguments = {
            "input_ids": tokens,
            "attention_mask": self.slots.long(),
            "position_ids": positions,
            "past_key_values": self.cache,
            "use_cache": True,
            "logits_to_keep": 1 if only_last else 0,
        }
        if self.tap_ids is None:
            return TargetStep(self.model(**arguments).logits, None, None).to(tokens.device)
        with tap_hidden_states(self.model, self.tap_ids) as recorder:
            logits = self.model(**arguments).logits
        return TargetStep(logits, recorder.taps, recorder.final).to(tokens.device)

    def keep(self, step: TargetStep, valid: Tensor, sequences: Tensor) -> TargetStep:
        """Of the last T slots only those that are True in `valid` [b, T] stay; of the batch only `sequences` [b'].

        Returns the step that was given, whose features are those of the slots that stay.
        """
        earlier = self.slots.shape[1] - valid.shape[1]
        slots = torch.cat([self.slots[:, :earlier], valid], dim=1)[sequences]
        if torch.equal(slots, self.slots):
            return step
        order = rightmost(slots)
        self.slots = slots.gather(1, order)
        for layer in self.cache.layers:
            for name in ("keys", "values"):  # [b, heads, S, head size]
                states = getattr(layer, name)
                setattr(layer, name, gather_slots(states[sequences.to(states.device)], order))
        return step
