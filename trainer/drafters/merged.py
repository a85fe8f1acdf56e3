"""Roll-out attention with O(rows) memory: ordinary causal attention over the step-0 keys, a few dot products for the
diagonals, merged by their log-sum-exp.

The scores are not kept for the backward but made again, some rows at a time. Backward needs no gradient of a log-sum-exp:
with the *merged* log-sum-exp L and the *merged* output O, each part's weights are exp(s - L), and
dL/ds = weight · (dO·v - dO·O), whichever part a key belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

CHUNK_ROWS = 64  # rows whose scores live at once; they meet only the keys between the first and last that they see


def merged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    diagonals: list[tuple[torch.Tensor, torch.Tensor]],
    scale: float,
) -> torch.Tensor:
    """q [heads, R, d]; k [kv_heads, T, d], v [kv_heads, T, d']; visible bool [R, T]; diagonals: (key, value) pairs
    [kv_heads, R, d] and [kv_heads, R, d'] of which row i sees its own. Softmax in fp32 at least. Every row must see
    something. → [heads, R, d']"""
    return _Merged.apply(q, k, v, visible, scale, *[x for pair in diagonals for x in pair])


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, visible, scale, *diagonals):
        wide = torch.promote_types(q.dtype, torch.float32)
        grouped = _group(q, k.shape[0]).to(wide) * scale  # [kv_heads, groups, R, d]
        wide_k, wide_v = k.to(wide), v.to(wide)
        own = (
            torch.stack([(grouped * key.to(wide).unsqueeze(1)).sum(-1) for key in diagonals[::2]], -1)
            if diagonals
            else None
        )
        out, logsumexp = grouped.new_empty(*grouped.shape[:-1], v.shape[-1]), torch.empty_like(grouped[..., 0])
        for rows, keys in _chunks(visible):
            scores = _scores(grouped[:, :, rows], wide_k[:, keys], visible[rows, keys])
            everything = scores if own is None else torch.cat([scores, own[:, :, rows]], -1)
            logsumexp[:, :, rows] = everything.logsumexp(-1)
            weights = (scores - logsumexp[:, :, rows, None]).exp_()
            out[:, :, rows] = weights @ wide_v[:, keys].unsqueeze(1)
        if own is not None:
            weights = (own - logsumexp[..., None]).exp()
            for j, value in enumerate(diagonals[1::2]):
                out += weights[..., j, None] * value.to(wide).unsqueeze(1)
        ctx.save_for_backward(q, k, v, visible, out, logsumexp, *diagonals)
        ctx.scale = scale
        return out.flatten(0, 1).to(q.dtype)

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, visible, out, logsumexp, *diagonals = ctx.saved_tensors
        wide = out.dtype
        grouped = _group(q, k.shape[0]).to(wide) * ctx.scale
        wide_k, wide_v, grad = k.to(wide), v.to(wide), _group(grad_out, k.shape[0]).to(wide)
        mean = (grad * out).sum(-1)  # dO·O: what every weight's gradient is measured against
        grad_q, grad_k, grad_v = torch.empty_like(grouped), torch.zeros_like(wide_k), torch.zeros_like(wide_v)
        for rows, keys in _chunks(visible):
            scores = _scores(grouped[:, :, rows], wide_k[:, keys], visible[rows, keys])
            weights = scores.sub_(logsumexp[:, :, rows, None]).exp_()
            grad_v[:, keys] += (weights.transpose(-1, -2) @ grad[:, :, rows]).sum(1)
            grad_scores = grad[:, :, rows] @ wide_v[:, keys].unsqueeze(1).transpose(-1, -2)
            grad_scores.sub_(mean[:, :, rows, None]).mul_(weights)
            grad_q[:, :, rows] = grad_scores @ wide_k[:, keys].unsqueeze(1)
            grad_k[:, keys] += (grad_scores.transpose(-1, -2) @ grouped[:, :, rows]).sum(1)
        grad_diagonals = []
        for key, value in zip(diagonals[::2], diagonals[1::2]):
            wide_key, wide_value = key.to(wide).unsqueeze(1), value.to(wide).unsqueeze(1)
            weights = ((grouped * wide_key).sum(-1) - logsumexp).exp()
            grad_scores = (weights * ((grad * wide_value).sum(-1) - mean))[..., None]
            grad_q += grad_scores * wide_key
            grad_diagonals.append((grad_scores * grouped).sum(1).to(key.dtype))
            grad_diagonals.append((weights[..., None] * grad).sum(1).to(value.dtype))
        grad_q = (grad_q * ctx.scale).flatten(0, 1).to(q.dtype)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, *grad_diagonals


def _group(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[heads, R, d] → [kv_heads, groups, R, d]"""
    return x.unflatten(0, (kv_heads, -1))


def _scores(grouped: torch.Tensor, k: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    return (grouped @ k.unsqueeze(1).transpose(-1, -2)).masked_fill_(~visible, float("-inf"))


def _chunks(visible: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Some rows at a time, and the span of keys that any of them sees."""
    for start in range(0, visible.shape[0], CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        seen = visible[rows].any(0).nonzero()
        yield rows, slice(int(seen[0]), int(seen[-1]) + 1)
