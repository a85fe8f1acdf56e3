"""Roll-out attention with O(rows) memory: ordinary causal attention over the step-0 keys, a few dot products for the
diagonals, merged by their log-sum-exp.

The scores are not kept for the backward but made again, some rows at a time; so is what a row may see. Backward needs no
gradient of a log-sum-exp: with the *merged* log-sum-exp L and the *merged* output O, each part's weights are exp(s - L),
and dL/ds = weight · (dO·v - dO·O), whichever part a key belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

CHUNK_ROWS = 64  # rows whose scores live at once; they meet only the keys between the first and last that they see


def merged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    diagonals: list[tuple[torch.Tensor, torch.Tensor]],
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [heads, R, d]; k [kv_heads, T, d], v [kv_heads, T, d']; row i sees the keys first[i] … last[i] (int64 [R]), at least
    one; diagonals: (key, value) pairs [kv_heads, R, d] and [kv_heads, R, d'] of which row i sees its own. Softmax in fp32
    at least. softcap and sinks [heads]: as in `attention.Scoring`. → [heads, R, d']"""
    return _Merged.apply(q, k, v, first, last, scale, softcap, sinks, *[x for pair in diagonals for x in pair])


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, first, last, scale, softcap, sinks, *diagonals):
        wide = torch.promote_types(q.dtype, torch.float32)
        grouped = _group(q, k.shape[0]).to(wide) * scale  # [kv_heads, groups, R, d]
        wide_k, wide_v = k.to(wide), v.to(wide)
        beside = [_cap((grouped * key.to(wide).unsqueeze(1)).sum(-1, keepdim=True), softcap) for key in diagonals[::2]]
        if sinks is not None:
            beside.append(sinks.to(wide).view(*grouped.shape[:2], 1, 1).expand(*grouped.shape[:3], 1))
        out, logsumexp = grouped.new_empty(*grouped.shape[:-1], v.shape[-1]), torch.empty_like(grouped[..., 0])
        for rows, keys, unseen in _chunks(first, last):
            scores = _cap(grouped[:, :, rows] @ wide_k[:, keys].unsqueeze(1).transpose(-1, -2), softcap)
            scores = scores.masked_fill_(unseen, float("-inf"))
            logsumexp[:, :, rows] = torch.cat([scores, *(x[:, :, rows] for x in beside)], -1).logsumexp(-1)
            weights = (scores - logsumexp[:, :, rows, None]).exp_()
            out[:, :, rows] = weights @ wide_v[:, keys].unsqueeze(1)
        for own, value in zip(beside, diagonals[1::2]):
            out += (own - logsumexp[..., None]).exp() * value.to(wide).unsqueeze(1)
        ctx.save_for_backward(q, k, v, first, last, sinks, out, logsumexp, *diagonals)
        ctx.scale, ctx.softcap = scale, softcap
        return out.flatten(0, 1).to(q.dtype)

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, first, last, sinks, out, logsumexp, *diagonals = ctx.saved_tensors
        wide, softcap = out.dtype, ctx.softcap
        grouped = _group(q, k.shape[0]).to(wide) * ctx.scale
        wide_k, wide_v, grad = k.to(wide), v.to(wide), _group(grad_out, k.shape[0]).to(wide)
        mean = (grad * out).sum(-1)  # dO·O: what every weight's gradient is measured against
        grad_q, grad_k, grad_v = torch.empty_like(grouped), torch.zeros_like(wide_k), torch.zeros_like(wide_v)
        for rows, keys, unseen in _chunks(first, last):
            scores = _cap(grouped[:, :, rows] @ wide_k[:, keys].unsqueeze(1).transpose(-1, -2), softcap)
            weights = (scores - logsumexp[:, :, rows, None]).masked_fill_(unseen, float("-inf")).exp_()
            grad_v[:, keys] += (weights.transpose(-1, -2) @ grad[:, :, rows]).sum(1)
            grad_scores = grad[:, :, rows] @ wide_v[:, keys].unsqueeze(1).transpose(-1, -2)
            grad_scores.sub_(mean[:, :, rows, None]).mul_(weights).mul_(_slope(scores, softcap))
            grad_q[:, :, rows] = grad_scores @ wide_k[:, keys].unsqueeze(1)
            grad_k[:, keys] += (grad_scores.transpose(-1, -2) @ grouped[:, :, rows]).sum(1)
        grad_diagonals = []
        for key, value in zip(diagonals[::2], diagonals[1::2]):
            wide_key, wide_value = key.to(wide).unsqueeze(1), value.to(wide).unsqueeze(1)
            scores = _cap((grouped * wide_key).sum(-1), softcap)
            weights = (scores - logsumexp).exp()
            grad_scores = (weights * ((grad * wide_value).sum(-1) - mean) * _slope(scores, softcap))[..., None]
            grad_q += grad_scores * wide_key
            grad_diagonals.append((grad_scores * grouped).sum(1).to(key.dtype))
            grad_diagonals.append((weights[..., None] * grad).sum(1).to(value.dtype))
        grad_q = (grad_q * ctx.scale).flatten(0, 1).to(q.dtype)
        grad_sinks = None
        if sinks is not None:  # they give no value, hence dO·v = 0
            weights = (sinks.to(wide).view(*mean.shape[:2], 1) - logsumexp).exp()
            grad_sinks = -(weights * mean).sum(-1).view_as(sinks).to(sinks.dtype)
        grad_k, grad_v = grad_k.to(k.dtype), grad_v.to(v.dtype)
        return grad_q, grad_k, grad_v, None, None, None, None, grad_sinks, *grad_diagonals


def _group(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[heads, R, d] → [kv_heads, groups, R, d]"""
    return x.unflatten(0, (kv_heads, -1))


def _cap(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _slope(scores: torch.Tensor, softcap: float | None) -> torch.Tensor | float:
    """The derivative of `_cap`, where it gives `scores`."""
    return 1 - (scores / softcap) ** 2 if softcap else 1.0


def _chunks(first: torch.Tensor, last: torch.Tensor) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Some rows at a time, the span of keys that any of them sees, and which of those each does not see."""
    firsts, lasts = first.tolist(), last.tolist()
    for start in range(0, len(firsts), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        keys = slice(min(firsts[rows]), max(lasts[rows]) + 1)
        index = torch.arange(keys.start, keys.stop, device=first.device)
        yield rows, keys, (index < first[rows, None]) | (index > last[rows, None])
