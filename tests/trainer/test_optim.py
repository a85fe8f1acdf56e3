"""The optimizer: a schedule that is a function of the step, moments that exist before a checkpoint fills them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from trainer.optim import OptimConfig, build_optimizer, clip_gradients, learning_rate


def test_warm_up_then_cosine_down_to_the_floor():
    config = OptimConfig(lr=1.0, warmup_fraction=0.1, final_lr_fraction=0.1)
    rates = [learning_rate(config, s, 100) for s in range(100)]
    assert rates[:10] == pytest.approx([(s + 1) / 10 for s in range(10)])
    assert rates[10] == pytest.approx(1.0) and rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert rates[10 + 89 // 2] == pytest.approx(0.55, abs=0.02)  # half-way between 1 and 0.1


@pytest.mark.parametrize("total", [1, 2, 3])
def test_the_shortest_runs_have_a_rate(total):
    assert all(0 < learning_rate(OptimConfig(lr=1.0), s, total) <= 1 for s in range(total))


def test_moments_exist_before_the_first_step():
    """A fresh AdamW has no state for a checkpoint to fill: resumed runs would silently start with zero moments."""
    p = torch.nn.Parameter(torch.ones(3))
    ours = build_optimizer(OptimConfig(lr=0.1, eps=1e-8), [p])
    assert set(ours.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
    q = torch.nn.Parameter(torch.ones(3))
    plain = torch.optim.AdamW([q], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for grad in (torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, 0.0, -1.0])):
        p.grad, q.grad = grad.clone(), grad.clone()
        ours.step(), plain.step()
    assert torch.equal(p, q)


def test_clipping_scales_all_gradients_by_one_factor():
    a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert clip_gradients([a, b], 1.0) == pytest.approx(5.0)
    assert math.isclose(torch.cat([a.grad, b.grad]).norm().item(), 1.0, rel_tol=1e-5)
    assert a.grad[0] / b.grad[0] == pytest.approx(0.75)
