"""Drafters that extend a chain token by token (EAGLE-3, MTP): how K steps are trained, and how a chain is drafted.

Letters: T rows of a pack, B sequences, H width, K draft steps.

Row t reads the target's features at position t and the *next* token x_{t+1}, and predicts x_{t+2}. At step k it reads
x_{t+1+k} and its own output of step k-1, and predicts x_{t+2+k}; the teacher is the target's distribution p_{t+1+k}.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..batch import Batch
from ..target import FrozenTarget
from .attention import CachedAttention, RolloutAttention
from .base import Committed, Drafter


@dataclass
class RolloutState:
    """One cache per layer."""

    caches: list[CachedAttention]


class RolloutDrafter(Drafter):
    """Subclasses implement `start`, `run_layers`, `normed` and `head`, and say how many layers attend."""

    first = 1
    attending: int  # how many layers there are, each with an attention of its own
    feeds_normed: bool  # a step reads the normed output of the one before it, else the output itself

    def start(self, taps: torch.Tensor, final: torch.Tensor, frozen: FrozenTarget) -> torch.Tensor:
        """The target's features [..., A, H] and [..., H] → what step 0 reads of them, [..., H]."""
        raise NotImplementedError

    def run_layers(self, embeds, hidden, positions, attentions, rows: torch.Tensor | None = None) -> torch.Tensor:
        """One step of all layers: embeds and hidden [..., N, H], positions int64 [..., N] → [..., N, H].

        rows: int64 [M], only these are wanted: [M, H] comes back, and the attentions (roll-outs) are narrowed to them.
        """
        raise NotImplementedError

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """An output of `run_layers` → what the head reads."""
        raise NotImplementedError

    def head(self, frozen: FrozenTarget) -> torch.Tensor:
        """[D, H]"""
        return frozen.draft_head(self.kept)

    # ---- training

    def roll_out(self, batch: Batch, frozen: FrozenTarget, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        """Training-time test (EAGLE-3, arXiv 2503.01840, §3.2). rows[k]: int64, ascending, the rows that step k runs (each
        step's are among the one before's). Returns the normed outputs of every step, [len(rows[k]), H]."""
        attentions = [RolloutAttention(batch.document_ids) for _ in range(self.attending)]
        tokens = batch.input_ids.roll(-1)  # row t's next token; the last row of a document is never a row of `rows`
        hidden = self.start(batch.taps, batch.final, frozen)
        outputs = []
        for k, wanted in enumerate(rows):
            if k == 0:
                hidden = self.run_layers(frozen.embed(tokens), hidden, batch.positions, attentions, wanted)
            else:
                kept = torch.searchsorted(rows[k - 1], wanted)
                for attention in attentions:
                    attention.narrow(kept)
                embeds = frozen.embed(tokens[wanted + k])
                hidden = self.run_layers(embeds, hidden[kept], batch.positions[wanted] + k, attentions)
            outputs.append(self.normed(hidden))
            if self.feeds_normed:
                hidden = outputs[-1]
        return outputs

    def forward(self, batch, targets, frozen, weights):
        step, row = targets.entries
        outputs = self.roll_out(batch, frozen, [row[step == k] for k in range(self.depth)])
        trained = targets.trained[step, row]
        loss, judged = self.draft_loss(
            batch, targets, frozen, torch.cat(outputs), self.head(frozen), weights[step] * trained
        )
        return loss, self.sums(targets, judged, judged.loss * trained)

    # ---- decoding

    def new_state(self, batch_size: int) -> RolloutState:
        return RolloutState([CachedAttention(batch_size) for _ in range(self.attending)])

    def choose(self, normed: torch.Tensor, frozen: FrozenTarget) -> torch.Tensor:
        """Greedy drafts [...], ids of the target's vocabulary, from normed states [..., H]."""
        return self.to_target(frozen.cap(normed @ self.head(frozen).T).argmax(-1))

    @torch.no_grad()
    def propose(self, state: RolloutState, rows: Committed, frozen: FrozenTarget, k: int) -> torch.Tensor:
        for cache in state.caches:
            cache.expect(rows.valid, commit=True)
        embeds, features = frozen.embed(rows.next_tokens), self.start(rows.taps, rows.final, frozen)
        hidden = self.run_layers(embeds, features, rows.positions, state.caches)
        index = torch.arange(rows.valid.shape[1], device=rows.valid.device)
        last = torch.where(rows.valid, index, 0).amax(1)  # the last valid row of each sequence
        batch = torch.arange(len(last), device=last.device)
        hidden, positions = hidden[batch, last, None], rows.positions[batch, last, None]
        alive = rows.valid.any(1, keepdim=True)
        drafts = []
        for step in range(k):
            normed = self.normed(hidden)
            drafts.append(self.choose(normed, frozen))  # [B, 1]
            if step == k - 1:
                break
            positions = positions + 1
            for cache in state.caches:
                cache.expect(alive, commit=False)
            feedback = normed if self.feeds_normed else hidden
            hidden = self.run_layers(frozen.embed(drafts[-1]), feedback, positions, state.caches)
        for cache in state.caches:
            cache.drop_drafts()
        return torch.cat(drafts, 1)
