"""The merged roll-out attention is the plain one: values and gradients in float64, for any chunking."""

from __future__ import annotations

import pytest
import torch

from trainer.drafters import merged
from trainer.drafters.merged import merged_attention


def plain_attention(q, k, v, visible, pairs, scale, softcap=None, sinks=None):
    """All keys at once: the step-0 keys, the diagonals, the sinks."""
    q = q.unflatten(0, (len(k), -1)) * scale
    own = [(q * key[:, None]).sum(-1, keepdim=True) for key, _ in pairs]
    scores = torch.cat([q @ k[:, None].mT, *own], -1)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    seen = torch.cat([visible, torch.ones(len(visible), len(pairs), dtype=torch.bool)], -1)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(*q.shape[:2], 1, 1).expand(*q.shape[:3], 1)], -1)
    weights = scores.softmax(-1)
    out = weights[..., : k.shape[1]] @ v[:, None]
    for i, (_, value) in enumerate(pairs):
        out = out + weights[..., k.shape[1] + i, None] * value[:, None]
    return out.flatten(0, 1)


@pytest.mark.parametrize("softcap,sinks", [(None, False), (1.5, False), (None, True), (1.5, True)])
@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("diagonals", [0, 1, 4])
@pytest.mark.parametrize("rows", [0, 1, 11])
def test_equals_attention_over_all_keys_at_once(monkeypatch, chunk, diagonals, rows, softcap, sinks):
    monkeypatch.setattr(merged, "CHUNK_ROWS", chunk)
    torch.manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, dtype=torch.double, requires_grad=True)

    index = torch.arange(20)
    first = torch.tensor([0] * 5 + [5] * 2 + [7] * 13)
    kept = torch.sort(torch.randperm(20)[:rows]).values
    visible = ((index >= first[:, None]) & (index <= index[:, None]))[kept]
    q, k, v = random(6, rows, 8), random(2, 20, 8), random(2, 20, 8)
    pairs = [(random(2, rows, 8), random(2, rows, 8)) for _ in range(diagonals)]
    sinks = random(6) if sinks else None
    inputs = [q, k, v, *(x for pair in pairs for x in pair), *([sinks] if sinks is not None else [])]
    weights = torch.randn(6, rows, 8, dtype=torch.double)
    plain = plain_attention(q, k, v, visible, pairs, 8**-0.5, softcap, sinks)
    ours = merged_attention(q, k, v, first[kept], kept, pairs, 8**-0.5, softcap, sinks)
    torch.testing.assert_close(ours, plain)
    gradients = [torch.autograd.grad((out * weights).sum(), inputs) for out in (ours, plain)]
    torch.testing.assert_close(*gradients)
