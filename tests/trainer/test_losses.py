"""The streaming teacher against the loss written out with whole [N, V] tensors, and rule 3: one denominator."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.trainer.conftest import slice_batch
from trainer import losses
from trainer.losses import LOSSES, Mixture, Pair, streamed_loss, summarise_teacher


def written_out(name, hidden, head, frozen, final, teacher_rows, labels, kept):
    """Every loss from its definition, over whole [N, V] tensors: the definitions of drafters.md §7, term by term."""
    readout = frozen.readout
    all_logits = (frozen.normed(final) @ readout.weight.T)[teacher_rows]
    if readout.bias is not None:
        all_logits = readout.softcap * torch.tanh(readout.scale * (all_logits + readout.bias) / readout.softcap)
    full = all_logits.softmax(-1) if kept is None else all_logits.softmax(-1)[:, kept]
    p = full / full.sum(-1, keepdim=True)
    q = (hidden @ head.T).softmax(-1)
    overlap = torch.minimum(full, q).sum(-1)
    kl = (p * (p / q).log()).sum(-1)
    m = (p + q) / 2
    named = {
        "ce": torch.stack([-q[n, x].log() if x >= 0 else 0 * q[n, 0] for n, x in enumerate(labels.tolist())]),
        "soft_ce": -(p * q.log()).sum(-1),
        "kl": kl,
        "reverse_kl": (q * (q / p).log()).sum(-1),
        "jsd": 0.5 * (p * (p / m).log()).sum(-1) + 0.5 * (q * (q / m).log()).sum(-1),
        "tv": 1 - overlap,
        "l1": 2 - 2 * overlap,
        "nla": -overlap.log(),
        "lk_hybrid": (lam := torch.exp(-3 * overlap).detach()) * kl + (1 - lam) * (1 - overlap),
    }
    return named[name], overlap


def test_l1_is_twice_the_total_variation_over_the_whole_vocabulary():
    p, q = torch.rand(2, 5, 7, dtype=torch.double).softmax(-1)
    pair = Pair(p, p, q.log(), torch.zeros(5, dtype=torch.long))
    torch.testing.assert_close(LOSSES["l1"](pair), (p - q).abs().sum(-1))


@pytest.mark.parametrize("family", ["plain head", "scale, bias and soft-cap"])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("chunk_elements", [1, 300, 1 << 20])
@pytest.mark.parametrize("name", LOSSES)
def test_streamed_loss_and_gradients_equal_the_materialised_ones(
    frozen, monkeypatch, name, reduced, chunk_elements, family
):
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", chunk_elements)
    torch.manual_seed(0)
    if family != "plain head":
        bias = torch.randn(61, dtype=torch.double)
        monkeypatch.setattr(frozen, "readout", replace(frozen.readout, bias=bias, scale=0.25, softcap=1.5))
        monkeypatch.setattr(frozen, "_draft_readout", None)
    kept = torch.arange(1, 61, 3) if reduced else None
    final = torch.randn(17, 24, dtype=torch.double)
    rows = torch.randint(0, 17, (40,))
    weights = torch.rand(40, dtype=torch.double)
    weights[::7] = 0
    hidden = torch.randn(40, 24, dtype=torch.double, requires_grad=True)
    head = torch.randn(61 if kept is None else len(kept), 24, dtype=torch.double, requires_grad=True)
    needed = torch.zeros(17, dtype=torch.bool)
    needed[rows] = True
    teacher = summarise_teacher(frozen, final, needed)
    labels = torch.randint(-1, len(head), (40,))
    loss, judged = streamed_loss(
        Mixture.parse(f"0.5*{name} + soft_ce"),
        hidden,
        head,
        teacher=teacher,
        teacher_readout=frozen.draft_readout(kept),
        teacher_rows=rows,
        labels=labels,
        weights=weights,
    )
    streamed = torch.autograd.grad(3 * loss, (hidden, head))
    values, acceptance = written_out(name, hidden, head, frozen, final, rows, labels, kept)
    values = 0.5 * values + written_out("soft_ce", hidden, head, frozen, final, rows, labels, kept)[0]
    expected = (weights * values).sum()
    materialised = torch.autograd.grad(3 * expected, (hidden, head))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(judged.loss, values)
    torch.testing.assert_close(judged.expected_acceptance, acceptance)
    assert torch.equal(judged.argmax, (hidden @ head.T).argmax(-1))
    torch.testing.assert_close(streamed, materialised)
    assert not streamed[0][::7].any()


def test_gradient_of_the_streamed_loss_equals_finite_differences(frozen):
    torch.manual_seed(0)
    hidden = torch.randn(5, 24, dtype=torch.double, requires_grad=True)
    head = torch.randn(61, 24, dtype=torch.double)
    teacher = summarise_teacher(frozen, torch.randn(5, 24, dtype=torch.double), torch.ones(5, dtype=torch.bool))

    def loss_of(h):
        return streamed_loss(
            Mixture.parse("soft_ce"),
            h,
            head,
            teacher=teacher,
            teacher_readout=frozen.readout,
            teacher_rows=torch.arange(5),
            labels=torch.zeros(5, dtype=torch.long),
            weights=torch.ones(5, dtype=torch.double),
        )[0]

    assert torch.autograd.gradcheck(loss_of, hidden)


def gradients(drafter, frozen, batches):
    """As the loop does it: denominators over all micro-batches first."""
    drafter.zero_grad()
    targets = [drafter.targets(b, frozen) for b in batches]
    denominators = sum(t.denominators for t in targets).clamp(min=1)
    weights = torch.tensor(drafter.step_weights, dtype=torch.double) / denominators
    for batch, target in zip(batches, targets):
        drafter(batch, target, frozen, weights)[0].backward()
    return {name: p.grad.clone() for name, p in drafter.named_parameters()}


@pytest.mark.parametrize("kept", [None, torch.arange(0, 61, 2)], ids=["full", "reduced"])
def test_gradient_is_independent_of_packing_padding_and_accumulation(world, kept):
    drafter = world.drafter(kept, steps=4)
    lengths = [3, 11, 1, 8, 2]
    whole = world.make(lengths, mask="answer")
    edges = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    alone = [slice_batch(whole.batch, a, b) for a, b in itertools.pairwise(edges)]
    padding = world.make([6], seed=9, mask="none").batch  # an unsupervised document weighs nothing
    packed = gradients(drafter, world.frozen, [whole.batch])
    assert any(g.abs().max() > 1e-3 for g in packed.values())
    torch.testing.assert_close(gradients(drafter, world.frozen, alone), packed)
    torch.testing.assert_close(gradients(drafter, world.frozen, [padding, *alone]), packed)


def test_gradient_equals_finite_differences(world):
    drafter, frozen = world.drafter(torch.arange(0, 61, 2), steps=3, num_layers=2, train_head=True), world.frozen
    batch = world.make([7, 9], mask="answer").batch
    grads = gradients(drafter, frozen, [batch])
    targets = drafter.targets(batch, frozen)
    weights = torch.tensor(drafter.step_weights, dtype=torch.double) / targets.denominators
    rng = torch.Generator().manual_seed(0)
    for name, p in drafter.named_parameters():
        direction = torch.randn(p.shape, generator=rng, dtype=torch.double)
        with torch.no_grad():
            losses_at = []
            for eps in (1e-6, -1e-6):
                p.add_(eps * direction)
                losses_at.append(drafter(batch, targets, frozen, weights)[0].item())
                p.sub_(eps * direction)
        numeric = (losses_at[0] - losses_at[1]) / 2e-6
        assert numeric == pytest.approx((grads[name] * direction).sum().item(), rel=1e-5, abs=1e-8), name


def test_a_pack_without_a_valid_label_weighs_zero(world):
    drafter = world.drafter(steps=3)
    grads = gradients(drafter, world.frozen, [world.make([5, 4], mask="none").batch])
    assert all(not g.any() for g in grads.values())
