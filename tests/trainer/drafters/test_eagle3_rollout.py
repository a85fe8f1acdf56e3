"""Training sees what decoding will see: the training forward against a literal draft loop, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from trainer.batch import round_counts
from trainer.drafters import Committed
from trainer.drafters.attention import RolloutAttention

OPTIONS = [
    {},
    {"norm_before_fc": True},
    {"fc_norm": True, "norm_output": True},
    {"norm_output": True},
    {"norm_before_residual": True},
    {"num_layers": 3},
    {"num_layers": 2, "norm_output": True, "norm_before_residual": True, "fc_norm": True},
    {"train_head": True},
    {"sliding_window": 4},
    {"num_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "norm_output": True},
    {"heads": 6, "kv_heads": 3, "head_dim": 4, "mlp_width": 20, "activation": "gelu"},
]
LENGTHS = [1, 2, 3, 9, 1, 14]


def causal_layers(drafter, embeds, hidden, positions):
    """All layers over one sequence of m rows, causally, from scratch: no cache, no diagonals. [m, H] → [m, H]."""
    cos, sin = (x[None] for x in drafter.rotary(positions))
    for i, layer in enumerate(drafter.layers):
        if i == 0:
            normed = layer.hidden_norm(hidden)
            x = torch.cat([layer.input_layernorm(embeds), normed], -1)
            residual = normed if layer.norm_before_residual else hidden
        else:
            x, residual = layer.input_layernorm(hidden), hidden
        attention = layer.self_attn
        q, k, v = (
            proj(x)[None].unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, cos.double(), sin.double())
        distance = positions[:, None] - positions
        seen = (distance >= 0) & (distance < (drafter.window(i) or len(positions)))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        residual = residual + attention.o_proj(out.transpose(1, 2).flatten(2)[0])
        hidden = residual + layer.mlp(layer.post_attention_layernorm(residual))
    return hidden


def draft_loop(drafter, frozen, taps, tokens, t, steps, *, forced: bool):
    """The round that starts at the bonus token tokens[t+1], drafted literally: rows 0…t are committed, then one row a step,
    each time from scratch. forced: feed the document's tokens, as in training; else the drafts. → logits, drafts."""
    embeds = [frozen.embed(tokens[r + 1]) for r in range(t + 1)]
    hidden = [drafter.fuse(taps[r]) for r in range(t + 1)]
    all_logits, drafts = [], []
    for k in range(steps):
        out = causal_layers(drafter, torch.stack(embeds), torch.stack(hidden), torch.arange(t + 1 + k))[-1]
        normed = drafter.norm(out)
        logits = normed @ drafter.head(frozen).T
        all_logits.append(logits)
        index = logits.argmax()
        drafts.append(index if drafter.kept is None else drafter.kept[index])
        if k == steps - 1 or (forced and t + 2 + k >= len(tokens)):
            break
        embeds.append(frozen.embed(tokens[t + 2 + k] if forced else drafts[-1]))
        hidden.append(normed if drafter.config.norm_output else out)
    return all_logits, drafts


def training_logits(drafter, frozen, batch, rows):
    return [out @ drafter.head(frozen).T for out in drafter.roll_out(batch, frozen, rows)]


def largest_difference(drafter, frozen, made, mask_rows=None):
    """Over every (row, step) that counts: training logits against the literal loop's."""
    batch = made.batch
    rows = [c.nonzero().squeeze(1) for c in round_counts(batch, 1, drafter.depth)] if mask_rows is None else mask_rows
    trained = training_logits(drafter, frozen, batch, rows)
    worst, start, compared = 0.0, 0, 0
    for document in made.pack.documents:
        stop = start + len(document)
        taps, tokens = batch.taps[start:stop], batch.input_ids[start:stop]
        for t in range(len(document) - 1):
            literal, _ = draft_loop(drafter, frozen, taps, tokens, t, drafter.depth, forced=True)
            for k, logits in enumerate(literal):
                at = (rows[k] == start + t).nonzero()
                if len(at):
                    worst = max(worst, (trained[k][at[0, 0]] - logits).abs().max().item())
                    compared += 1
        start = stop
    assert compared == sum(map(len, rows))
    return worst


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("mask", ["all", "random", "answer"])
def test_every_row_and_step_equals_the_literal_draft_loop(world, options, mask):
    drafter = world.drafter(steps=4, **options)
    with torch.no_grad():
        assert largest_difference(drafter, world.frozen, world.make(LENGTHS, mask=mask)) < 1e-9


@pytest.mark.parametrize("what", ["mask", "position", "token", "feedback", "boundary", "window", "still window"])
def test_a_shift_by_one_is_noticed(world, monkeypatch, what):
    """The golden test can fail: each of these mistakes, made on purpose, is far above its tolerance."""
    drafter = world.drafter(steps=3, sliding_window=4 if "window" in what else 0)
    made = world.make(LENGTHS, mask="all")
    if what == "mask":
        original = RolloutAttention.__init__

        def blind_to_itself(self, first, last, *rest):  # but for a document's first row, which sees nothing else
            original(self, first, torch.maximum(first, last - 1), *rest)

        monkeypatch.setattr(RolloutAttention, "__init__", blind_to_itself)
    elif "window" in what:  # one position too long; or where step 0 had it, in all steps
        original = RolloutAttention.__init__

        def longer(self, first, last, past, *rest):
            start = last - made.batch.positions[last]
            further = len(past) if what == "still window" else 1
            original(self, torch.maximum(first - further, start), last, past, *rest)

        monkeypatch.setattr(RolloutAttention, "__init__", longer)
    elif what == "boundary":
        original = RolloutAttention.__init__
        monkeypatch.setattr(RolloutAttention, "__init__", lambda self, first, *rest: original(self, first * 0, *rest))
    elif what == "position":
        run = drafter.run_layers

        def late(embeds, hidden, positions, *rest):
            return run(embeds, hidden, positions + (len(positions) != len(made.batch.input_ids)), *rest)

        monkeypatch.setattr(drafter, "run_layers", late)
    elif what == "token":
        monkeypatch.setattr(made.batch.input_ids.__class__, "roll", lambda self, _: torch.roll(self, -2))
    else:
        drafter.config.norm_output = True
        reference = world.drafter(steps=3)
        monkeypatch.setattr(drafter, "roll_out", reference.roll_out)
    with torch.no_grad():
        assert largest_difference(drafter, world.frozen, made) > 1e-3


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduced", [False, True])
def test_propose_equals_the_literal_loop_over_ragged_rounds(world, options, reduced):
    """Two sequences in one batch, committed in uneven pieces, with padding rows in between."""
    kept = torch.arange(0, 61, 2) if reduced else None
    drafter, frozen = world.drafter(kept, steps=4, **options), world.frozen
    pieces = [(7, 5), (1, 3), (4, 0), (2, 2)]
    sequences = [world.make([20], seed=s, mask="all").batch for s in (3, 4)]
    state, done = drafter.new_state(2), [0, 0]
    for piece in pieces:
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
        drafts = drafter.propose(state, rows, frozen, 4)
        for b, n in enumerate(piece):
            if n:
                s = sequences[b]
                _, literal = draft_loop(drafter, frozen, s.taps, s.input_ids, done[b] - 1, 4, forced=False)
                assert drafts[b].tolist() == [int(x) for x in literal]
