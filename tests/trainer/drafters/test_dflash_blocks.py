"""DFlash and DSpark: training sees what decoding will see. Everything against a literal block draft, in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.trainer.conftest import slice_batch
from tests.trainer.drafters.block_cases import CASES, DFLASH, literal_block, literal_draft, literal_loss, make_drafter
from trainer.batch import Batch
from trainer.drafters import Committed, blocks
from trainer.drafters.dflash import dpace, label_probabilities
from trainer.losses import Teacher
from trainer.target import FrozenTarget

LENGTHS = [1, 2, 3, 9, 1, 14]


def training_logits(drafter, frozen, batch, targets):
    """Of every draft that counts, in the order of `targets.entries`."""
    step, row = targets.entries
    anchors = targets.counts[0].nonzero().squeeze(1)
    hidden = drafter.train_blocks(batch, frozen, anchors)
    before = (anchors[:, None] + torch.arange(drafter.depth)).clamp(max=len(batch.input_ids) - 1)
    states, head = drafter.read_out(hidden, batch.input_ids[before], frozen)
    return (states @ head.T)[torch.searchsorted(anchors, row), step]


def largest_difference(drafter, frozen, made, literal=None, batch=None):
    """Over every (anchor, draft) that counts: training logits against the literal block's (of `literal`, if given)."""
    literal = literal or drafter
    targets = literal.targets(made.batch, frozen)
    trained = training_logits(drafter, frozen, batch or made.batch, targets)
    worst, start, blocks_seen = 0.0, 0, 0
    step, row = targets.entries
    for document in made.pack.documents:
        stop = start + len(document)
        taps, tokens = made.batch.taps[start:stop], made.batch.input_ids[start:stop]
        for a in range(len(document)):
            entries = (row == start + a).nonzero().squeeze(1)
            if len(entries):
                out = literal_draft(literal, frozen, taps, tokens, a, forced=True)
                for entry in entries:
                    worst = max(worst, (trained[entry] - out.logits[step[entry]]).abs().max().item())
                blocks_seen += 1
        start = stop
    assert blocks_seen == int(targets.counts[0].sum())
    return worst


@pytest.mark.parametrize("mask", ["all", "random", "answer"])
@pytest.mark.parametrize("kind,options", CASES, ids=str)
def test_every_anchor_and_slot_equals_the_literal_block(target_config, frozen, world, kind, options, mask):
    drafter, made = make_drafter(target_config, kind, options), world.make(LENGTHS, mask=mask)
    with torch.no_grad():
        assert largest_difference(drafter, frozen, made) < 1e-9


@pytest.mark.parametrize("options", DFLASH, ids=str)
def test_slots_past_the_end_of_a_document_are_the_literal_ones_too(target_config, frozen, world, options):
    """In decoding a block knows of no end: all its slots are there, whatever will be judged."""
    drafter, made = make_drafter(target_config, "dflash", options), world.make([3, 6], mask="all")
    with torch.no_grad():
        rows = torch.tensor([1, 2, 3, 8])  # position 0 of a document, and the last position of each, among them
        trained = drafter.train_blocks(made.batch, frozen, rows)
        for hidden, row in zip(trained, rows.tolist()):
            start = 0 if row < 3 else 3
            literal = literal_block(
                drafter, frozen, made.batch.taps[start:row], int(made.batch.input_ids[row]), row - start
            )
            torch.testing.assert_close(hidden, literal, atol=1e-10, rtol=0)


def test_chunks_of_blocks_make_no_difference(target_config, frozen, world, monkeypatch):
    drafter, made = make_drafter(target_config, "dflash", {}), world.make(LENGTHS, mask="all")
    for size in (1, 500):
        monkeypatch.setattr(blocks, "CHUNK_SCORES", size)
        with torch.no_grad():
            assert largest_difference(drafter, frozen, made) < 1e-9


MISTAKES = [
    "context holds the anchor",
    "causal block",
    "one slot late",
    "other blocks",
    "position",
    "boundary",
    "window",
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(target_config, frozen, world, monkeypatch, mistake):
    """The golden test can fail: each of these, made on purpose, is far above its tolerance."""
    options = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
    drafter, made = make_drafter(target_config, "dflash", options), world.make(LENGTHS, mask="all")
    literal, batch = make_drafter(target_config, "dflash", options), made.batch
    with torch.no_grad():
        assert largest_difference(drafter, frozen, made, literal) < 1e-9
    if mistake == "context holds the anchor":
        monkeypatch.setattr("trainer.drafters.dflash.context_seen", lambda p, a, w: a[:, None] >= p)
    elif mistake == "causal block":
        causal = torch.ones(4, 4, dtype=torch.bool).tril()
        monkeypatch.setattr("trainer.drafters.dflash.block_seen", lambda *_: causal)
    elif mistake == "one slot late":
        train = drafter.train_blocks
        monkeypatch.setattr(drafter, "train_blocks", lambda *args: train(*args).roll(1, 1))
    elif mistake == "other blocks":
        call = blocks.TrainedBlocks.__call__
        monkeypatch.setattr(
            blocks.TrainedBlocks, "__call__", lambda self, *x: call(self, *x[:3], x[3].roll(1, 0), x[4].roll(1, 0))
        )
    elif mistake == "position":
        run = drafter.run_blocks
        monkeypatch.setattr(drafter, "run_blocks", lambda bonus, anchors, *rest: run(bonus, anchors + 1, *rest))
    elif mistake == "boundary":
        batch = replace(batch, document_ids=torch.zeros_like(batch.document_ids))
    else:
        drafter.config.sliding_window = 4
    with torch.no_grad():
        assert largest_difference(drafter, frozen, made, literal, batch) > 1e-3


# ---- the loss: labels, teacher rows, weights, denominators, gradients


def ce(log_q, p, p_full, label):
    return -log_q[label] if label >= 0 else log_q.sum() * 0


def dspark_mixture(log_q, p, p_full, label):
    return 0.1 * ce(log_q, p, p_full, label) + 0.9 * 2 * (1 - torch.minimum(p_full, log_q.exp()).sum())


LOSS_CASES = [
    ("dflash", {}, ce),
    ("dflash", {"slots": "anchor_predicts", "gamma": 2.0}, ce),
    ("dflash", {"weighting": "dpace"}, ce),
    ("dflash", {"weighting": "dpace", "dpace_alpha": 0.2, "slots": "anchor_predicts"}, ce),
    ("dspark", {}, dspark_mixture),
    ("dspark", {"markov_head": "gated"}, dspark_mixture),
    ("dspark", {"markov_head": "rnn"}, dspark_mixture),
    ("dspark", {"markov_head": "rnn", "weighting": "dpace"}, dspark_mixture),
    ("dspark", {"markov_rank": 0, "confidence_weight": 0.5}, dspark_mixture),
]


def as_the_loop_weighs(drafter, targets):
    divisors = drafter.divisors(sum(t.denominators for t in targets)).clamp(min=1)
    return torch.tensor(drafter.step_weights, dtype=torch.double) / divisors


def gradients(drafter):
    return {name: p.grad for name, p in drafter.named_parameters()}


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("kind,options,mixture", LOSS_CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_loss_and_gradients_equal_the_literal_ones(target_config, frozen, world, kind, options, mixture, reduced):
    """Autograd through the literal drafts. (D-PACE weights and the confidence's targets are constants in both.)"""
    kept = torch.arange(0, 61, 2) if reduced else None
    made = world.make([1, 2, 3, 9, 8], mask="random")
    drafter = make_drafter(target_config, kind, options, kept)
    targets = drafter.targets(made.batch, frozen)
    loss, _ = drafter(made.batch, targets, frozen, as_the_loop_weighs(drafter, [targets]))
    loss.backward()
    literal = make_drafter(target_config, kind, options, kept)
    expected = literal_loss(literal, frozen, made, mixture)
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-11, rtol=1e-9)
    for name, grad in gradients(drafter).items():
        wanted = gradients(literal)[name]
        assert grad is not None and torch.isfinite(grad).all() and grad.abs().max() > 1e-9, name
        torch.testing.assert_close(grad, wanted, atol=1e-10, rtol=1e-8, msg=name)
    assert frozen.head_weight.grad is None and frozen.embedding_weight.grad is None


@pytest.mark.parametrize("attribute", ["label", "teacher row"])
def test_a_label_or_teacher_off_by_one_is_noticed(target_config, frozen, world, monkeypatch, attribute):
    made = world.make([9, 8], mask="answer")
    drafter = make_drafter(target_config, "dspark", {"markov_rank": 0, "confidence_weight": 0.0})
    targets = drafter.targets(made.batch, frozen)
    weights = as_the_loop_weighs(drafter, [targets])
    expected = literal_loss(drafter, frozen, made, dspark_mixture)
    assert abs(drafter(made.batch, targets, frozen, weights)[0] - expected) < 1e-11
    if attribute == "label":
        monkeypatch.setattr(drafter, "to_draft", lambda labels: labels.roll(1))
    else:
        t = targets.teacher
        targets = replace(targets, teacher=Teacher(t.normed.roll(1, 0), t.argmax.roll(1), t.logsumexp.roll(1)))
    assert abs(drafter(made.batch, targets, frozen, weights)[0] - expected) > 1e-3


@pytest.mark.parametrize("kind,options", [("dflash", {}), ("dspark", {"markov_head": "rnn", "confidence_weight": 0.0})])
def test_gradients_equal_finite_differences(target_config, frozen, world, kind, options):
    drafter, made = make_drafter(target_config, kind, options), world.make([3, 9], mask="answer")
    targets = drafter.targets(made.batch, frozen)
    weights = as_the_loop_weighs(drafter, [targets])

    def value():
        return drafter(made.batch, targets, frozen, weights)[0]

    value().backward()
    generator = torch.Generator().manual_seed(0)
    for name, p in drafter.named_parameters():
        direction = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        direction /= direction.norm()
        with torch.no_grad():
            p.add_(direction, alpha=1e-5)
            above = value()
            p.sub_(direction, alpha=2e-5)
            below = value()
            p.add_(direction, alpha=1e-5)
        torch.testing.assert_close(
            (above - below) / 2e-5, (p.grad * direction).sum(), atol=1e-7, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_what_the_mask_excludes_gets_no_gradient(target_config, frozen, world, kind):
    drafter, made = make_drafter(target_config, kind, {}), world.make(LENGTHS, mask="random")
    taps = made.batch.taps.requires_grad_()
    targets = drafter.targets(made.batch, frozen)
    drafter(made.batch, targets, frozen, as_the_loop_weighs(drafter, [targets]))[0].backward()
    reached, start = torch.zeros(len(taps), dtype=torch.bool), 0
    for n in LENGTHS:
        anchors = targets.counts[0, start : start + n].nonzero().squeeze(1)
        if len(anchors):
            reached[start : start + int(anchors[-1])] = True  # all that some block of the document sees
        start += n
    assert torch.equal(taps.grad.abs().amax((1, 2)) > 0, reached)


@pytest.mark.parametrize("kind,options", [("dflash", {}), ("dflash", {"weighting": "dpace"}), ("dspark", {})])
def test_packed_padded_or_accumulated_it_is_one_loss(target_config, frozen, world, kind, options):
    made = world.make([4, 1, 9, 6], mask="random")
    padding = world.make([5], seed=9, mask="none").batch
    names = ("input_ids", "document_ids", "positions", "supervised", "taps", "final")
    padded = Batch(**{name: torch.cat([getattr(b, name) for b in (made.batch, padding)]) for name in names})
    padded.document_ids[-5:] = 4
    starts = [0, 4, 5, 14, 20]
    ways = [[made.batch], [padded], [slice_batch(made.batch, a, b) for a, b in itertools.pairwise(starts)]]
    results = []
    for batches in ways:
        drafter = make_drafter(target_config, kind, options)
        targets = [drafter.targets(batch, frozen) for batch in batches]
        weights, total, sums = as_the_loop_weighs(drafter, targets), 0.0, 0
        for batch, target in zip(batches, targets):
            loss, judged = drafter(batch, target, frozen, weights)
            loss.backward()
            total, sums = total + loss.detach(), sums + judged
        results.append((total, sums, gradients(drafter)))
    for total, sums, grads in results[1:]:
        torch.testing.assert_close(total, results[0][0])
        torch.testing.assert_close(sums, results[0][1])
        for name, grad in grads.items():
            torch.testing.assert_close(grad, results[0][2][name], atol=1e-11, rtol=1e-9, msg=name)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_pack_without_any_anchor_trains_nothing(target_config, frozen, world, kind):
    drafter, made = make_drafter(target_config, kind, {}), world.make([1, 5], mask="none")
    targets = drafter.targets(made.batch, frozen)
    loss, sums = drafter(made.batch, targets, frozen, as_the_loop_weighs(drafter, [targets]))
    loss.backward()
    assert loss == 0 and sums.abs().sum() == 0
    assert all(g is None or g.abs().max() == 0 for g in gradients(drafter).values())


def test_dpace_weights():
    """By hand: two drafts count, alpha ½, q = (.5, .25) → s = (.75, .625)."""
    counts = torch.tensor([[True, True, False], [False, False, False]])
    weights = dpace(torch.tensor([[0.5, 0.25, 0.9], [0.1, 0.1, 0.1]]), counts, 0.5)
    expected = torch.tensor([[0.75 + 0.75 * 0.625, 0.75 * 0.625, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(weights, expected)


def test_probabilities_of_labels(monkeypatch):
    monkeypatch.setattr("trainer.drafters.dflash.CHUNK_ELEMENTS", 20)  # several chunks
    torch.manual_seed(0)
    states, head, labels = torch.randn(7, 4), torch.randn(9, 4), torch.tensor([0, 8, -1, 3, 4, -1, 5])
    expected = (states @ head.T).softmax(-1)[torch.arange(7), labels]
    expected[labels < 0] = 0
    torch.testing.assert_close(label_probabilities(states, head, labels), expected)


# ---- decoding


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("kind,options", CASES, ids=str)
def test_propose_equals_the_literal_draft_over_ragged_rounds(target_config, frozen, world, kind, options, reduced):
    """Two sequences in one batch, committed in uneven pieces, with padding rows in between; also fewer drafts than
    a block holds."""
    kept = torch.arange(0, 61, 2) if reduced else None
    drafter = make_drafter(target_config, kind, options, kept)
    pieces = [(7, 1), (1, 3), (4, 0), (2, 2)]
    sequences = [world.make([20], seed=s, mask="all").batch for s in (3, 4)]
    state, done = drafter.new_state(2), [0, 0]
    for number, piece in enumerate(pieces):
        width = max(piece) + 1  # one padding row, in front
        valid = torch.zeros(2, width, dtype=torch.bool)
        index = torch.zeros(2, width, dtype=torch.long)
        for b, n in enumerate(piece):
            valid[b, width - n :] = True
            index[b, width - n :] = torch.arange(done[b], done[b] + n)
            done[b] += n
        rows = Committed(
            taps=torch.stack([s.taps[i] for s, i in zip(sequences, index)]),
            final=torch.stack([s.final[i] for s, i in zip(sequences, index)]),
            next_tokens=torch.stack([s.input_ids[i + 1] for s, i in zip(sequences, index)]),
            positions=index,
            valid=valid,
        )
        k = drafter.depth - (number == 1 and drafter.depth > 1)
        drafts = drafter.propose(state, rows, frozen, k)
        assert drafts.shape == (2, k)
        for b, n in enumerate(piece):
            if n:
                s = sequences[b]
                out = literal_draft(drafter, frozen, s.taps, s.input_ids, done[b], forced=False)
                assert drafts[b].tolist() == [int(x) for x in out.drafts[:k]]


def test_the_target_family_decides_what_the_head_does(target_config, world):
    """The teacher has its soft-cap; the draft does not, for no engine caps a drafter's logits."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(1)
    model = LlamaForCausalLM(target_config).double().requires_grad_(False)
    capped = FrozenTarget(model)
    capped.readout = replace(capped.readout, softcap=0.5)
    made = world.make([9, 8], mask="answer")
    drafter = make_drafter(target_config, "dspark", {"markov_head": "gated"})
    targets = drafter.targets(made.batch, capped)
    loss, _ = drafter(made.batch, targets, capped, as_the_loop_weighs(drafter, [targets]))
    torch.testing.assert_close(loss, literal_loss(drafter, capped, made, dspark_mixture), atol=1e-11, rtol=1e-9)
