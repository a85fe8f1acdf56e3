"""What a draft layer's queries may see: in the training roll-out, and in decoding.

The layers themselves are the same in both; they hand (q, k, v) to one of these. q is [..., heads, N, d], k and v are
[..., kv_heads, N, d]; the softmax is in fp32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..losses import upcast
from .merged import merged_attention


@dataclass(frozen=True)
class Scoring:
    """How a family turns q·k into weights. scale: of the scores, d^-½ by default. softcap: scores become
    softcap·tanh(score/softcap) (Gemma 2). sinks [heads]: a logit per head that takes weight and gives no value (gpt-oss).
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


PLAIN = Scoring()


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scoring: Scoring = PLAIN
) -> torch.Tensor:
    """Grouped-query attention. visible: bool, broadcastable to [..., 1, 1, N, S]. A query that sees nothing gets zeros."""
    groups = q.shape[-3] // k.shape[-3]
    wide = upcast(q).dtype
    q_ = q.to(wide).unflatten(-3, (k.shape[-3], groups)) * (scoring.scale or q.shape[-1] ** -0.5)
    scores = q_ @ k.to(wide).unsqueeze(-3).transpose(-1, -2)
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    sinks = []
    if scoring.sinks is not None:
        sinks = [scoring.sinks.to(wide).view(-1, groups, 1, 1).expand(*scores.shape[:-1], 1)]
    scores = scores.masked_fill(~visible, float("-inf"))
    # (A row without any visible key would be NaN: its maximum is -inf. Such rows are padding; they become zero.)
    weights = torch.cat([scores, *sinks], -1).softmax(-1).nan_to_num(0.0)
    out = weights[..., : k.shape[-2]] @ v.to(wide).unsqueeze(-3)
    return out.flatten(-4, -3).to(q.dtype)


class RolloutAttention:
    """One step of one layer in the training-time test over one pack: step 0 is causal inside each document; at step k row
    t sees the step-0 keys of rows ≤ t of its document and its own keys of steps 1..k. That is what a chain decode sees.

    first, last: int64 [N], of each query the first and last row of the pack whose step-0 keys it sees. past: keys and
    values of step 0, of the whole pack, then those of the later steps, of the queries' rows alone; empty: this is step 0.
    gather: rows of this rank → of the whole pack (`batch.Part`).

    `made` is what the call adds to `past`. A pack is one sequence: q, k, v come with a batch dimension of 1, or with none.
    """

    def __init__(
        self,
        first: torch.Tensor,
        last: torch.Tensor,
        past: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        gather: Callable[..., tuple[torch.Tensor, ...]] = lambda *rows: rows,
    ):
        self._first, self._last, self._past, self._gather = first, last, past, gather

    def narrow(self, queries: torch.Tensor) -> None:
        """The call will come with the queries of these rows only; with keys of all."""
        self._first, self._last = self._first[queries], self._last[queries]

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring = PLAIN) -> torch.Tensor:
        if q.dim() == 4:
            return self(q[0], k[0], v[0], scoring)[None]
        self.made = (k, v) if self._past else self._gather(k, v)
        (keys, values), *diagonals = (*self._past, self.made)
        scale = scoring.scale or q.shape[-1] ** -0.5
        return merged_attention(
            q, keys, values, self._first, self._last, diagonals, scale, scoring.softcap, scoring.sinks
        )


def rightmost(valid: torch.Tensor) -> torch.Tensor:
    """valid: bool [B, S] → int64 [B, S'], which slots to take so that each sequence's valid ones lie at the right end, in
    their order. S': the most that a sequence has."""
    width = int(valid.sum(dim=1).max()) if valid.numel() else 0
    # A stable sort of the mask puts the holes first and leaves what stays in its order.
    return valid.int().argsort(dim=1, stable=True)[:, valid.shape[1] - width :]


def gather_slots(states: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """states [B, heads, S, d], order int64 [B, S'] → [B, heads, S', d]."""
    index = order.to(states.device)[:, None, :, None]
    return states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3]))


class CachedAttention:
    """Decoding, B sequences at once: a growing cache of slots, of which each sequence uses some.

    A query sees every valid slot before its own call and, among the slots of its call, those up to itself; with a window, the
    last so many of them. (A sequence's valid slots are its positions in order: its window is counted in them.)
    `drop_drafts` ends a round: as many slots stay as the longest sequence has valid ones.
    """

    def __init__(self, batch_size: int, window: int | None = None):
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self._window = window
        self._valid = torch.zeros(batch_size, 0, dtype=torch.bool)
        self._committed = 0
        self._new: torch.Tensor | None = None

    @property
    def slots(self) -> int:
        return self._valid.shape[1]

    def expect(self, valid: torch.Tensor, *, commit: bool) -> None:
        """Announce the rows of the next call: valid bool [B, N]. commit: they stay; else `drop_drafts` forgets them."""
        self._new, self._commit = valid, commit

    def commit(self, slots: int) -> None:
        """The first `slots` of those that are not committed yet stay after all."""
        self._committed += slots

    def drop_drafts(self) -> None:
        self._valid = self._valid[:, : self._committed]
        if self._keys is None:
            return
        self._keys, self._values = (x[..., : self._committed, :] for x in (self._keys, self._values))
        if not self._valid.all():
            self._compact()

    def select(self, sequences: torch.Tensor) -> None:
        """Only these of the batch go on: int64 [B']."""
        self._valid = self._valid[sequences.to(self._valid.device)]
        if self._keys is not None:
            self._keys, self._values = (x[sequences] for x in (self._keys, self._values))
            self._compact()

    def _compact(self) -> None:
        order = rightmost(self._valid)
        self._valid = self._valid.gather(1, order)
        self._keys, self._values = (gather_slots(x, order) for x in (self._keys, self._values))
        self._committed = order.shape[1]

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring = PLAIN) -> torch.Tensor:
        assert self._new is not None, "expect() announces each call"
        before, n = self._valid.shape[1], k.shape[-2]
        self._valid = torch.cat([self._valid.to(k.device), self._new], 1)
        self._keys = k if self._keys is None else torch.cat([self._keys, k], -2)
        self._values = v if self._values is None else torch.cat([self._values, v], -2)
        if self._commit:
            self._committed = before + n
        index = torch.arange(before + n, device=k.device)
        causal = index[None] <= before + torch.arange(n, device=k.device)[:, None]
        visible = causal[None] & self._valid[:, None]
        if self._window:
            rank = self._valid.cumsum(1)
            visible &= rank[:, before:, None] - rank[:, None] < self._window
        visible = visible[:, None, None]
        return attend(q, self._keys, self._values, visible, scoring)
