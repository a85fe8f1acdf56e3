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
from .rollout_cost import RolloutCost


@dataclass
class RolloutState:
    """One cache per layer."""

    caches: list[CachedAttention]

    def select(self, sequences: torch.Tensor) -> None:
        """Only these of the batch go on: int64 [B']."""
        for cache in self.caches:
            cache.select(sequences)


class RolloutDrafter(RolloutCost, Drafter):
    """Subclasses implement `start`, `run_layers`, `normed` and `head`, and say how many layers attend."""

    first = 1
    attending: int  # how many layers there are, each with an attention of its own
    feeds_normed: bool  # a step reads the normed output of the one before it, else the output itself

    def start(self, taps: torch.Tensor, final: torch.Tensor, frozen: FrozenTarget) -> torch.Tensor:
        """The target's features [..., A, H] and [..., H] → what step 0 reads of them, [..., H]."""
        raise NotImplementedError

    def run_layers(self, embeds, hidden, positions, attentions, rows: torch.Tensor | None = None) -> torch.Tensor:
        """One step of all layers: embeds and hidden [..., N, H], positions int64 [..., N] → [..., N, H].

        rows: int64 [M], only these are wanted, and [M, H] comes back; keys are made of all.
        """
        raise NotImplementedError

    def window(self, layer: int) -> int | None:
        """How many positions a layer's query sees, its own included; None: all of its document. At least K."""
        return None

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """An output of `run_layers` → what the head reads."""
        raise NotImplementedError

    def head(self, frozen: FrozenTarget) -> torch.Tensor:
        """[D, H]"""
        return frozen.draft_head(self.kept)

    # ---- training

    def roll_out(self, batch: Batch, frozen: FrozenTarget, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        """Training-time test (EAGLE-3, arXiv 2503.01840, §3.2). rows[k]: int64, ascending, the batch's own rows that step k
        runs (each step's are among the one before's). Returns the normed outputs of every step, [len(rows[k]), H]."""
        rows = [batch.own_rows, *rows]
        hidden, past, outputs = self.start(batch.taps, batch.final[: len(batch.taps)], frozen), [], []
        for k in range(len(rows) - 1):
            if k and not len(rows[k + 1]):  # families' layers cannot take this
                outputs.append(outputs[-1][:0])
                continue
            hidden, normed, made = self.recomputed(self._step, batch, frozen, rows[: k + 2], hidden, past)
            past = [*past, made]
            outputs.append(normed)
        return outputs

    def _step(self, batch: Batch, frozen: FrozenTarget, rows: list[torch.Tensor], hidden: torch.Tensor, past: list):
        """The k-th step: from rows[k] to rows[k+1], of which step 0 runs all of the former and a later one the latter.

        hidden [len(rows[k]), H]: fed back from the step before. past[j][i]: keys and values of layer i that step j made.
        Returns what is fed back of rows[k+1], their normed outputs, and what this step adds to `past`.
        """
        k, kept = len(past), torch.searchsorted(rows[-2], rows[-1])
        run = rows[-1] if k else rows[0]
        narrowed = [torch.searchsorted(rows[j + 1], run) for j in range(1, k)]
        attentions = []
        for i in range(self.attending):
            own = [(key[..., at, :], value[..., at, :]) for (key, value), at in zip((m[i] for m in past[1:]), narrowed)]
            seen = [past[0][i], *own] if k else []
            back, window = batch.positions[run], self.window(i)  # how many rows behind its own a row sees
            if window:  # it is of positions: at step k the query is k further on
                back = back.clamp(max=window - 1 - k)
            attentions.append(RolloutAttention(run - back, run, seen, batch.part.gather))
        embeds = frozen.embed(batch.input_ids.roll(-1 - k)[run])  # (a document's last row is run in step 0 at most)
        hidden = self.run_layers(
            embeds, hidden[kept] if k else hidden, batch.positions[run] + k, attentions, None if k else kept
        )
        normed = self.normed(hidden)
        return normed if self.feeds_normed else hidden, normed, [attention.made for attention in attentions]

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
        return RolloutState([CachedAttention(batch_size, self.window(i)) for i in range(self.attending)])

    def choose(self, normed: torch.Tensor, frozen: FrozenTarget) -> torch.Tensor:
        """Greedy drafts [...], ids of the target's vocabulary, from normed states [..., H]."""
        return self.to_target((normed @ self.head(frozen).T).argmax(-1))

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
