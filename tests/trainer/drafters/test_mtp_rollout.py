"""MTP: training sees what decoding will see. The training forward against literal loops from scratch, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.trainer.conftest import row_tensors, slice_batch
from trainer.batch import round_counts
from trainer.drafters import Committed, build_drafter
from trainer.drafters.attention import RolloutAttention
from trainer.drafters.mtp import MTPConfig
from trainer.target import FrozenTarget

OPTIONS = [
    {},
    {"concat": "hidden_first"},
    {"hidden": "pre_norm"},
    {"hidden": "pre_norm", "concat": "hidden_first"},
    {"form": "chained"},
    {"form": "chained", "concat": "hidden_first"},
    {"form": "chained", "hidden": "pre_norm", "attention": "own_step"},
]
OWN_STEP = [{"attention": "own_step"}, {"attention": "own_step", "concat": "hidden_first", "hidden": "pre_norm"}]
LENGTHS = [1, 2, 3, 9, 1, 14]


@pytest.fixture(scope="module")
def frozen(target_config) -> FrozenTarget:
    """With a final norm that does something: behind weights of 1, the module's own norm would undo it."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(target_config).double().requires_grad_(False)
    model.lm_head.weight.normal_(std=0.4)
    model.model.norm.weight.uniform_(0.5, 1.5)
    return FrozenTarget(model)


@pytest.fixture
def mtp(target_config, frozen):
    """mtp(**options) → a float64 drafter without the family's fp32 norms, which would hide behind their rounding."""

    def make(kept=None, **options):
        torch.manual_seed(2)
        drafter = build_drafter(MTPConfig(**options), target_config, kept).double()
        for module in drafter.mtp_layers:
            for name, part in list(module.named_children()):
                if "RMSNorm" in type(part).__name__:
                    setattr(module, name, nn.RMSNorm(target_config.hidden_size, target_config.rms_norm_eps).double())
        with torch.no_grad():  # norms of 1 and tiny weights would hide mistakes
            for name, p in drafter.named_parameters():
                p.add_(torch.randn_like(p) * (0.2 if "norm" in name else 0.15))
        return drafter

    return make


def module_rows(drafter, k, embeds, hidden, positions):
    """Module k over one sequence of m rows, causally, from scratch, written out for a Llama layer. [m, H] → [m, H]."""
    m, attention = drafter.mtp_layers[k], drafter.mtp_layers[k].self_attn
    a, b = m.token_layernorm(embeds), m.hidden_layernorm(hidden)
    x = m.input_proj(torch.cat([b, a] if drafter.config.concat == "hidden_first" else [a, b], -1))
    y = m.input_layernorm(x)
    q, k_, v = (
        proj(y)[None].unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    cos, sin = (table[None].double() for table in drafter.rotary(positions))
    q, k_ = apply_rotary_pos_emb(q, k_, cos, sin)
    out = F.scaled_dot_product_attention(q, k_, v, is_causal=True, enable_gqa=True)
    x = x + attention.o_proj(out.transpose(1, 2).flatten(2)[0])
    return m.final_layernorm(x + m.mlp(m.post_attention_layernorm(x)))


def start(drafter, frozen, final):
    return frozen.normed(final) if drafter.config.hidden == "post_norm" else final


def chain_loop(drafter, frozen, final, tokens, t, steps, *, forced: bool):
    """Shared form, one cache as engines have it: rows 0…t are committed, then one row a step. → logits, drafts."""
    embeds, hidden = frozen.embed(tokens[1 : t + 2]), start(drafter, frozen, final[: t + 1])
    logits, drafts = [], []
    for k in range(steps):
        out = module_rows(drafter, 0, embeds, hidden, torch.arange(t + 1 + k))[-1]
        logits.append(out @ drafter.head(frozen).T)
        drafts.append(drafter.to_target(logits[-1].argmax()))
        if k == steps - 1 or (forced and t + 2 + k >= len(tokens)):
            break
        embeds = torch.cat([embeds, frozen.embed(tokens[t + 2 + k] if forced else drafts[-1])[None]])
        hidden = torch.cat([hidden, out[None]])
    return logits, drafts


def step_loop(drafter, frozen, final, tokens, t, steps, *, forced: bool):
    """Every step runs all rows 0…t of its own: row j of step k reads x_{j+1+k}, the text as far as it is there (x_{t+1} is
    the bonus token) and then the drafts, or, forced, the document. → logits, drafts."""
    stream = list(tokens[1 : t + 2])
    hidden = start(drafter, frozen, final[: t + 1])
    logits, drafts = [], []
    for k in range(steps):
        module = k if drafter.config.form == "chained" else 0
        hidden = module_rows(drafter, module, frozen.embed(torch.stack(stream[k:])), hidden, torch.arange(k, t + 1 + k))
        logits.append(hidden[-1] @ drafter.head(frozen).T)
        drafts.append(drafter.to_target(logits[-1].argmax()))
        if forced and t + 2 + k >= len(tokens):
            break
        stream.append(tokens[t + 2 + k] if forced else drafts[-1])
    return logits, drafts


def literal_loop(drafter, *args, **kwargs):
    """What a decode sees."""
    return (step_loop if drafter.config.form == "chained" else chain_loop)(drafter, *args, **kwargs)


def largest_difference(drafter, frozen, made, loop=literal_loop):
    """Over every (row, step) that counts: training logits against the loop's."""
    batch = made.batch
    rows = [c.nonzero().squeeze(1) for c in round_counts(batch, 1, drafter.depth)]
    trained = [out @ drafter.head(frozen).T for out in drafter.roll_out(batch, frozen, rows)]
    worst, first, compared = 0.0, 0, 0
    for document in made.pack.documents:
        stop = first + len(document)
        final, tokens = batch.final[first:stop], batch.input_ids[first:stop]
        for t in range(len(document) - 1):
            literal, _ = loop(drafter, frozen, final, tokens, t, drafter.depth, forced=True)
            for k, logits in enumerate(literal):
                at = (rows[k] == first + t).nonzero()
                if len(at):
                    worst = max(worst, (trained[k][at[0, 0]] - logits).abs().max().item())
                    compared += 1
        first = stop
    assert compared == sum(map(len, rows))
    return worst


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("mask", ["all", "random", "answer"])
def test_every_row_and_step_equals_the_literal_draft_loop(world, mtp, options, mask):
    with torch.no_grad():
        assert largest_difference(mtp(steps=4, **options), world.frozen, world.make(LENGTHS, mask=mask)) < 1e-9


@pytest.mark.parametrize("options", OWN_STEP, ids=str)
@pytest.mark.parametrize("mask", ["all", "random"])
def test_own_step_equals_its_definition_and_not_the_decode(world, mtp, options, mask):
    """FastMTP as published: each step sees its own step's keys. A decode of the shared form has one cache and sees others."""
    drafter, made = mtp(steps=3, **options), world.make(LENGTHS, mask=mask)
    with torch.no_grad():
        assert largest_difference(drafter, world.frozen, made, step_loop) < 1e-9
        assert largest_difference(drafter, world.frozen, made, chain_loop) > 1e-3


@pytest.mark.parametrize("what", ["mask", "boundary", "position", "token", "feedback", "concat", "norm"])
@pytest.mark.parametrize("form", ["shared", "chained"])
def test_a_shift_by_one_is_noticed(world, mtp, monkeypatch, what, form):
    """The golden test can fail: each of these mistakes, made on purpose, is far above its tolerance."""
    drafter, made = mtp(steps=3, form=form), world.make(LENGTHS, mask="all")
    original, run = RolloutAttention.__init__, drafter.run_module
    if what == "mask":

        def blind_to_itself(self, first, last, *rest, **options):  # but for a document's first row
            original(self, first, torch.maximum(first, last - 1), *rest, **options)

        monkeypatch.setattr(RolloutAttention, "__init__", blind_to_itself)
    elif what == "boundary":
        monkeypatch.setattr(
            RolloutAttention, "__init__", lambda self, first, *rest, **o: original(self, first * 0, *rest, **o)
        )
    elif what == "position":  # of single rows: a shift of all of a step's rows is none, in a module of its own
        monkeypatch.setattr(drafter, "run_module", lambda k, e, h, p, a: run(k, e, h, p + torch.arange(len(p)), a))
    elif what == "token":
        monkeypatch.setattr(made.batch.input_ids.__class__, "roll", lambda self, n: torch.roll(self, n - 1))
    elif what == "feedback":  # the hidden state of the row before
        monkeypatch.setattr(drafter, "run_module", lambda k, e, h, p, a: run(k, e, h.roll(1, 0), p, a))
    elif what == "concat":
        with torch.no_grad():
            assert largest_difference(drafter, world.frozen, made) < 1e-9
        drafter.config.concat = "hidden_first"
        monkeypatch.setattr(drafter, "run_module", lambda k, e, h, p, a: run(k, h, e, p, a))
    else:
        monkeypatch.setattr(drafter, "start", lambda taps, final, frozen: final)
    with torch.no_grad():
        assert largest_difference(drafter, world.frozen, made) > 1e-3


@pytest.mark.parametrize("options", [*OPTIONS, *OWN_STEP], ids=str)
@pytest.mark.parametrize("reduced", [False, True])
def test_propose_equals_the_literal_loop_over_ragged_rounds(world, mtp, options, reduced):
    """Two sequences in one batch, committed in uneven pieces, with padding rows in between."""
    kept = torch.arange(0, 61, 2) if reduced else None
    drafter, frozen = mtp(kept, steps=4, **options), world.frozen
    pieces = [(1, 5), (1, 3), (7, 0), (2, 2), (0, 1), (5, 4)]
    sequences = [world.make([24], seed=s, mask="all").batch for s in (3, 4)]
    state, done = drafter.new_state(2), [0, 0]
    for i, piece in enumerate(pieces):
        width = max(piece) + 1  # one padding row, in front or behind
        valid = torch.zeros(2, width, dtype=torch.bool)
        index = torch.zeros(2, width, dtype=torch.long)
        for b, n in enumerate(piece):
            slots = slice(width - n, None) if i % 2 else slice(0, n)
            valid[b, slots] = True
            index[b, slots] = torch.arange(done[b], done[b] + n)
            done[b] += n
        rows = Committed(
            taps=torch.stack([s.taps[i] for s, i in zip(sequences, index)]),
            final=torch.stack([s.final[i] for s, i in zip(sequences, index)]),
            next_tokens=torch.stack([s.input_ids[i + 1] for s, i in zip(sequences, index)]),
            positions=index,
            valid=valid,
        )
        drafts = drafter.propose(state, rows, frozen, 4)
        for b, n in enumerate(piece):
            if n:
                s = sequences[b]
                _, literal = literal_loop(drafter, frozen, s.final, s.input_ids, done[b] - 1, 4, forced=False)
                assert drafts[b].tolist() == [int(x) for x in literal]


def loss_of(drafter, frozen, batch):
    targets = drafter.targets(batch, frozen)
    weights = torch.tensor(drafter.step_weights, dtype=torch.double)
    return drafter(batch, targets, frozen, weights)


@pytest.mark.parametrize("options", [*OPTIONS, *OWN_STEP], ids=str)
def test_packing_changes_nothing(world, mtp, options):
    """Rule 3: the sums over a pack, also over a padded one, are those over its documents alone, and so are the gradients."""
    drafter, made = mtp(steps=3, loss="ce + 0.5*kl", **options), world.make(LENGTHS)
    packed, judged = loss_of(drafter, world.frozen, made.batch)
    padding = world.make([5], seed=9, mask="none").batch
    joined = {name: torch.cat([x, getattr(padding, name)]) for name, x in row_tensors(made.batch).items()}
    joined["document_ids"][-5:] += len(LENGTHS)
    padded, judged_padded = loss_of(drafter, world.frozen, replace(made.batch, **joined))
    torch.testing.assert_close((padded, judged_padded), (packed, judged), rtol=1e-9, atol=1e-9)
    together = torch.autograd.grad(packed, list(drafter.parameters()), allow_unused=True)
    alone, sums, first = 0.0, 0.0, 0
    for document in made.pack.documents:
        one = slice_batch(made.batch, first, first + len(document))
        loss, of_one = loss_of(drafter, world.frozen, one)
        alone, sums, first = alone + loss, sums + of_one, first + len(document)
    torch.testing.assert_close(packed, alone, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(judged, sums, rtol=1e-9, atol=1e-9)
    apart = torch.autograd.grad(alone, list(drafter.parameters()), allow_unused=True)
    for a, b in zip(together, apart):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("options", [*OPTIONS[:2], OPTIONS[4], OWN_STEP[0]], ids=str)
def test_gradients_equal_finite_differences(world, mtp, options):
    drafter, batch = mtp(steps=3, loss="ce + 0.5*kl", **options), world.make([3, 9]).batch
    loss, _ = loss_of(drafter, world.frozen, batch)
    names, parameters = zip(*drafter.named_parameters())
    gradients = torch.autograd.grad(loss, parameters)
    generator = torch.Generator().manual_seed(0)
    for name, p, gradient in zip(names, parameters, gradients):
        direction = torch.randn(p.shape, generator=generator, dtype=torch.double)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                p.add_(direction, alpha=sign * 1e-6)
                values.append(loss_of(drafter, world.frozen, batch)[0].item())
                p.sub_(direction, alpha=sign * 1e-6)
        expected = (values[0] - values[1]) / 2e-6
        assert (gradient * direction).sum().item() == pytest.approx(expected, rel=1e-5, abs=1e-6), name


def test_what_is_masked_has_no_gradient(world, mtp):
    """Nothing supervised, nothing learnt; and no gradient from features behind the last row that counts."""
    drafter = mtp(steps=3)
    loss, sums = loss_of(drafter, world.frozen, world.make([9, 4], mask="none").batch)
    assert loss == 0 and sums.abs().sum() == 0
    assert all(not g.any() for g in torch.autograd.grad(loss, list(drafter.parameters())))


def test_step_weights_are_fastmtps(mtp):
    assert [round(w, 2) for w in mtp(steps=3).step_weights] == [0.51, 0.31, 0.18]


def test_a_chain_drafts_no_more_than_it_has_modules(mtp):
    assert mtp(form="chained", steps=2).config.max_drafts == 2
    assert mtp(steps=2).config.max_drafts is None
