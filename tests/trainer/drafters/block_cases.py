"""DFlash and DSpark drafted literally: one block at a time, from scratch, out of the specification's sentences."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from trainer.drafters import build_drafter
from trainer.drafters.dflash import DFlashConfig
from trainer.drafters.dspark import DSparkConfig

MASK_TOKEN = 60
SLIDING, FULL = "sliding_attention", "full_attention"
DFLASH = [
    {},
    {"slots": "anchor_predicts"},
    {"num_layers": 1, "block_size": 2},
    {"num_layers": 3, "layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 3},
    {
        "slots": "anchor_predicts",
        "layer_types": [SLIDING, SLIDING],
        "sliding_window": 2,
        "sliding_window_non_causal": False,
    },
    {"layer_types": [SLIDING, SLIDING], "sliding_window": 4, "sliding_window_non_causal": False},
]
DSPARK = [
    {"markov_head": "vanilla"},
    {"markov_head": "gated"},
    {"markov_head": "rnn"},
    {"markov_head": "rnn", "confidence_weight": 0.0},
    {"markov_rank": 0},
    {"markov_head": "gated", "layer_types": [SLIDING, FULL], "sliding_window": 3},
]
CASES = [("dflash", options) for options in DFLASH] + [("dspark", options) for options in DSPARK]


def make_drafter(target_config, kind: str, options: dict, kept=None):
    """A float64 drafter in which norms are not 1 and no weight is tiny, which would hide mistakes."""
    torch.manual_seed(2)
    common = {"num_layers": 2, "block_size": 4, "mask_token": MASK_TOKEN, "anchors": 10_000}
    config = {"dflash": DFlashConfig, "dspark": DSparkConfig}[kind]
    if kind == "dspark":
        common["markov_rank"] = 5
    drafter = build_drafter(config(**{**common, **options}), target_config, kept).double()
    with torch.no_grad():
        for name, p in drafter.named_parameters():
            p.add_(torch.randn_like(p) * (0.2 if "norm" in name else 0.15))
    return drafter


def literal_block(drafter, frozen, taps, bonus: int, a: int):
    """The normed states of all K drafts of the block anchored at position a: [K, H]. taps [a, A, H]: of positions 0…a-1."""
    config, size = drafter.config, drafter.config.block_size
    assert len(taps) == a
    context = drafter.hidden_norm(drafter.fc(taps.flatten(1)))
    x = frozen.embed(torch.tensor([bonus] + [config.mask_token] * (size - 1)))
    cos, sin = drafter.rotary(torch.arange(a + size))
    for layer, kind in zip(drafter.layers, drafter.layer_types):
        attention = layer.self_attn
        normed = layer.input_layernorm(x)

        def heads(y, attention=attention):
            return y.unflatten(1, (-1, attention.head_dim))

        both = torch.cat([context, normed])
        q = attention.q_norm(heads(attention.q_proj(normed))).transpose(0, 1)[None]
        k = attention.k_norm(heads(attention.k_proj(both))).transpose(0, 1)[None]
        v = heads(attention.v_proj(both)).transpose(0, 1)[None]
        q = apply_rotary_pos_emb(q, q, cos[None, a:].double(), sin[None, a:].double())[0]
        k = apply_rotary_pos_emb(k, k, cos[None].double(), sin[None].double())[0]
        seen = torch.ones(size, a + size, dtype=torch.bool)
        if kind == SLIDING:
            for j in range(size):
                for t in range(a + size):
                    in_window = a - config.sliding_window <= t
                    in_order = t <= a + j or config.sliding_window_non_causal
                    seen[j, t] = in_window if t < a else in_order
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0]
        x = x + attention.o_proj(out.transpose(0, 1).reshape(size, -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    x = drafter.norm(x)
    return x if config.slots == "anchor_predicts" else x[1:]


def literal_draft(drafter, frozen, taps, tokens, a: int, forced: bool):
    """One round, bonus token x_a. forced: the sequential head is fed the document's tokens, as far as there are any; else
    its own drafts. → logits [n, D], drafts (target ids), confidence logits (or None)."""
    hidden = literal_block(drafter, frozen, taps[:a], int(tokens[a]), a)
    head = drafter.head(frozen)
    bias = getattr(drafter, "markov_head", None)
    sure = getattr(drafter, "confidence_head", None)
    previous, state, out = tokens[a], None, SimpleNamespace(logits=[], drafts=[], confidence=[])
    for k, h in enumerate(hidden):
        logits = head @ h
        features = h
        if bias is not None:
            w = bias.markov_w1.weight[previous]
            features = torch.cat([h, w])
            if bias.kind == "vanilla":
                e = w
            elif bias.kind == "gated":
                e = torch.sigmoid(bias.gate_proj(torch.cat([h, w]))) * w
            else:
                state = torch.zeros_like(w) if state is None else state
                g, c, o = bias.joint_proj(torch.cat([state, w, h])).split(len(w))
                state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
                e = torch.tanh(o)
            logits = logits + bias.markov_w2.weight @ e
        out.logits.append(logits)
        out.drafts.append(drafter.to_target(out.logits[-1].argmax()))
        out.confidence.append(None if sure is None else (sure.proj.weight @ features + sure.proj.bias)[0])
        if forced and a + 1 + k >= len(tokens):
            break
        previous = tokens[a + 1 + k] if forced else out.drafts[-1]
    return out


def capped(softcap, logits):
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def literal_loss(drafter, frozen, made, mixture):
    """The whole loss of a pack (its own denominator), document by document, anchor by anchor, draft by draft.

    mixture(log_q [D], p_kept [D], p_full [D], label) → the loss of one draft.
    """
    config, total, trained, start = drafter.config, 0.0, 0, 0
    for document in made.pack.documents:
        n = len(document)
        taps, final, tokens = (x[start : start + n] for x in (made.batch.taps, made.batch.final, made.batch.input_ids))
        supervised = torch.from_numpy(document.loss_mask)
        start += n
        for a in range(n - 1):
            if not (supervised[a] and supervised[a + 1]):
                continue
            out = literal_draft(drafter, frozen, taps, tokens, a, forced=True)
            losses, probs, beside, takes = [], [], [], []
            for k in range(drafter.depth):
                if a + 1 + k >= n or not supervised[a : a + 2 + k].all():
                    break
                teacher = capped(frozen.readout.softcap, frozen.head_weight @ frozen.normed(final[a + k]))
                p_full, log_q, label = teacher.softmax(-1), out.logits[k].log_softmax(-1), int(tokens[a + 1 + k])
                take = True
                if drafter.kept is not None:
                    take = int(teacher.argmax()) in drafter.kept.tolist() or config.keep_unmapped
                    p_full = p_full[drafter.kept]
                    label = drafter.kept.tolist().index(label) if label in drafter.kept.tolist() else -1
                losses.append(mixture(log_q, p_full / p_full.sum(), p_full, label))
                probs.append(log_q[label].exp().detach() if label >= 0 else torch.zeros(()).double())
                takes.append(take)
                if out.confidence[k] is not None:
                    accept = torch.minimum(p_full, log_q.exp()).sum().detach()
                    beside.append(
                        config.confidence_weight * F.binary_cross_entropy_with_logits(out.confidence[k], accept)
                    )
            for k in range(len(losses)):
                if config.weighting == "dpace":
                    smooth = [(1 - config.dpace_alpha) * q + config.dpace_alpha for q in probs]
                    pace = sum(torch.stack(smooth[: i + 1]).prod() for i in range(k, len(smooth)))
                    total = total + takes[k] * pace * losses[k] + (beside[k] if beside else 0)
                else:
                    pace = drafter.step_weights[k]
                    total = total + pace * (takes[k] * losses[k] + (beside[k] if beside else 0))
                trained += takes[k]
    return total / max(trained, 1)
