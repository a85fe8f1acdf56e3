"""The merged roll-out attention is the plain one: values and gradients in float64, for any chunking."""

from __future__ import annotations

import pytest
import torch

from trainer.drafters import merged
from trainer.drafters.attention import attend


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("diagonals", [0, 1, 4])
@pytest.mark.parametrize("rows", [0, 1, 11])
def test_equals_attention_over_all_keys_at_once(monkeypatch, chunk, diagonals, rows):
    monkeypatch.setattr(merged, "CHUNK_ROWS", chunk)
    torch.manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, dtype=torch.double, requires_grad=True)

    document = torch.tensor([0] * 5 + [1] * 2 + [2] * 13)
    index = torch.arange(20)
    kept = torch.sort(torch.randperm(20)[:rows]).values
    visible = ((document[:, None] == document) & (index[:, None] >= index))[kept]
    q, k, v = random(6, rows, 8), random(2, 20, 8), random(2, 20, 8)
    pairs = [(random(2, rows, 8), random(2, rows, 8)) for _ in range(diagonals)]
    inputs = [q, k, v, *(x for pair in pairs for x in pair)]
    weights = torch.randn(6, rows, 8, dtype=torch.double)
    plain = attend(q, k, v, visible, pairs)
    ours = merged.merged_attention(q, k, v, visible, pairs, 8**-0.5)
    torch.testing.assert_close(ours, plain)
    gradients = [torch.autograd.grad((out * weights).sum(), inputs) for out in (ours, plain)]
    torch.testing.assert_close(*gradients)
