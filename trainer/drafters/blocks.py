"""Blocks drafted in one pass (DFlash, DSpark): which anchors a pack trains, and what a block's queries may see.

Letters: T context positions, N blocks of B slots, d head dimension. A block starts at its anchor: position a, the bonus
token. It sees the context before the anchor (strictly: the anchor has not been through the target yet), and itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from ..losses import upcast
from .attention import attend, gather_slots

CHUNK_SCORES = 1 << 25  # attention scores that live at once in training: 128 MiB in fp32


def draw_anchors(
    candidates: torch.Tensor, document_ids: torch.Tensor, budget: int, generator: torch.Generator
) -> torch.Tensor:
    """bool [T]: at most `budget` of the candidates (bool [T]), drawn without replacement.

    The budget is dealt out in turns: every document gets its first anchor before any gets a second. A short document is
    trained on all of its anchors before a long one takes the rest.
    """
    rows = candidates.nonzero().squeeze(1)
    rows = rows[torch.randperm(len(rows), generator=generator).to(rows.device)]
    order = document_ids[rows].argsort(stable=True)
    _, sizes = document_ids[rows[order]].unique_consecutive(return_counts=True)
    index = torch.arange(len(rows), device=rows.device)
    turn = torch.empty_like(index)  # how many of its document come before each row
    turn[order] = index - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    chosen = torch.zeros_like(candidates)
    chosen[rows[turn.argsort(stable=True)[:budget]]] = True
    return chosen


def context_seen(positions: torch.Tensor, anchors: torch.Tensor, window: int | None) -> torch.Tensor:
    """positions int64 [..., T], of the context. anchors int64 [N], positions too. → bool [N, T].

    window: the last so many positions before the anchor, for all slots of a block alike.
    """
    distance = anchors[:, None] - positions
    return (distance > 0) & (distance <= window) if window else distance > 0


def block_seen(size: int, causal: bool, device: torch.device | None = None) -> torch.Tensor:
    """bool [B, B]: what a slot sees of its own block."""
    seen = torch.ones(size, size, dtype=torch.bool, device=device)
    return seen.tril() if causal else seen


class TrainedBlocks:
    """One layer's attention in training: N blocks over one context, each block by itself.

    context: some of the blocks → what they see of the context, bool [n, T]. block: bool [B, B]. gather: rows of this rank →
    of the whole pack (`batch.Part`). Blocks go in chunks whose scores are made again in the backward, so that memory does
    not grow with N·B·T.
    """

    def __init__(
        self,
        context: Callable[[slice], torch.Tensor],
        block: torch.Tensor,
        gather: Callable[..., tuple[torch.Tensor, ...]],
    ):
        self._context, self._block, self._gather = context, block, gather

    @torch.compiler.disable  # the number of blocks differs from pack to pack: it would be compiled anew for each
    def __call__(self, keys, values, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """keys and values [kv_heads, R, d], of this rank's rows of the context. q [N, heads, B, d], k and v
        [N, kv_heads, B, d] → [N, heads, B, d]."""
        keys, values = self._gather(keys, values)
        size = max(1, CHUNK_SCORES // (q.shape[1] * q.shape[2] * (keys.shape[1] + q.shape[2])))
        # Without any block, too: each weight has a gradient on every rank then, and each rank takes the same collectives.
        chunks = [slice(i, i + size) for i in range(0, max(1, len(q)), size)]
        return torch.cat(
            [
                checkpoint(self._attend, chunk, keys, values, q[chunk], k[chunk], v[chunk], use_reentrant=False)
                for chunk in chunks
            ]
        )

    def _attend(self, chunk: slice, keys, values, q, k, v) -> torch.Tensor:
        context = self._context(chunk)
        columns = context.any(0).nonzero()  # anchors are ascending: a chunk sees a part of the pack
        first, stop = (int(columns[0]), int(columns[-1]) + 1) if len(columns) else (0, 0)
        wide, narrow = upcast(q).dtype, q.dtype
        keys, values = (x[:, first:stop].to(wide) for x in (keys, values))
        k, v, q = k.to(wide), v.to(wide), q.to(wide).unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5
        scores = torch.einsum("ngrbd,gtd->ngrbt", q, keys)
        scores = scores.masked_fill(~context[:, None, None, None, first:stop], float("-inf"))
        own = torch.einsum("ngrbd,ngsd->ngrbs", q, k).masked_fill(~self._block, float("-inf"))
        weights = torch.cat([scores, own], -1).softmax(-1)
        out = torch.einsum("ngrbt,gtd->ngrbd", weights[..., : stop - first], values)
        out = out + torch.einsum("ngrbs,ngsd->ngrbd", weights[..., stop - first :], v)
        return out.flatten(1, 2).to(narrow)


class CachedBlocks:
    """One layer's attention in decoding: N sequences, one block each, over a context that grows call by call."""

    def __init__(self):
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def expect(self, context: torch.Tensor, block: torch.Tensor) -> None:
        """What the next call sees. context: bool [N, S], of the cached positions, those that it adds included."""
        self._seen = torch.cat([context[:, None].expand(-1, len(block), -1), block.expand(len(context), -1, -1)], -1)

    def __call__(self, keys, values, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """keys and values [N, kv_heads, T, d]: of the context's new positions."""
        self._keys = keys if self._keys is None else torch.cat([self._keys, keys], -2)
        self._values = values if self._values is None else torch.cat([self._values, values], -2)
        k, v = torch.cat([self._keys, k], -2), torch.cat([self._values, v], -2)
        return attend(q, k, v, self._seen[:, None, None])

    def take(self, order: torch.Tensor) -> None:
        """Of the cached positions only these stay, of each sequence: int64 [N, S]."""
        self._keys, self._values = (gather_slots(x, order) for x in (self._keys, self._values))

    def select(self, sequences: torch.Tensor) -> None:
        """Only these of the batch go on: int64 [N']."""
        if self._keys is not None:
            self._keys, self._values = (x[sequences] for x in (self._keys, self._values))
