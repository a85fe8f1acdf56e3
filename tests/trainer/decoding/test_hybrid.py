"""Targets with a recurrent state: judged losslessly, and after every round in the state that plain decoding is in."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    JambaConfig,
    LlamaConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from data_pipelines.engines.anatomy import tap_hidden_states
from tests.trainer.decoding.decoding_cases import SHAPE, KnownDrafter
from tests.trainer.decoding.test_chain import generate
from trainer.decoding import judges
from trainer.decoding.chain import decode_chain, decode_plain
from trainer.decoding.judges import NotJudged, find_way, try_way
from trainer.decoding.replay import ReplayedTarget
from trainer.decoding.target_cache import CachedTarget

EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
SMALL = {**SHAPE, "num_hidden_layers": 2}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
BLOCK, STEPS = "replayed state", "replayed state, token by token"
HYBRIDS = {
    "qwen3_5": (BLOCK, lambda: Qwen3_5TextConfig(**SMALL, **LINEAR)),
    "qwen3_next": (
        BLOCK,
        lambda: Qwen3NextConfig(**SMALL, **EXPERTS, **LINEAR, shared_expert_intermediate_size=24),
    ),
    "falcon_h1": (
        BLOCK,
        lambda: FalconH1Config(
            **SMALL, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_d_ssm=64, mamba_chunk_size=8
        ),
    ),
    # Its Mamba layers begin anew at every block.
    "jamba": (
        STEPS,
        lambda: JambaConfig(
            **SMALL, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False, mamba_d_state=8, num_experts=2
        ),
    ),
}
NEW, K = 24, 4


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request):
    torch.manual_seed(0)
    way, config = HYBRIDS[request.param]
    model = AutoModelForCausalLM.from_config(config(), dtype=torch.float32).eval().requires_grad_(False)
    for p in model.parameters():
        if p.dim() == 1:  # biases of zero and norms of one would hide what is not computed
            p.add_(torch.randn_like(p) * 0.1)
    return way, model


class Watched(ReplayedTarget):
    """Keeps what the target's caches hold after each round, by the text that they are the state of."""

    states: dict[tuple[int, ...], list[torch.Tensor]]

    def forward(self, tokens, positions, valid, **options):
        self.texts = [()] * len(tokens) if not self.caches else self.texts
        self.block = tokens
        return super().forward(tokens, positions, valid, **options)

    def keep(self, step, valid, sequences):
        step = super().keep(step, valid, sequences)
        self.texts = [self.texts[b] + tuple(self.block[b, valid[b]].tolist()) for b in sequences.tolist()]
        for text, cache in zip(self.texts, self.caches):
            self.states[text] = [tensor.clone() for layer in cache.layers for tensor in tensors_of(layer)]
        return step


def tensors_of(layer) -> list[torch.Tensor]:
    """Keys and values, recurrent states and convolution states."""
    values = [x for value in vars(layer).values() for x in (value.values() if isinstance(value, dict) else [value])]
    return [x for x in values if isinstance(x, torch.Tensor)]


def watch(monkeypatch, way):
    """The states of what is decoded from now on."""
    watched = type("Watched", (Watched,), {"states": {}})
    monkeypatch.setitem(judges.WAYS, way, lambda model, taps: watched(model, taps, stepwise=way == STEPS))
    return watched.states


def prompts_of_lengths(*lengths):
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, 96, (n,), generator=draw).tolist() for n in lengths]


PATTERNS = {
    "half right": lambda i, j: (i * 7 + j * 5) % 11 in (0, 3, 4, 9),
    "never right": lambda i, j: True,
    "oracle": lambda i, j: False,
    **{f"wrong at slot {slot}": lambda i, j, slot=slot: j == slot for slot in range(1, K + 1)},
}


def test_text_and_states_are_those_of_plain_decoding(hybrid, monkeypatch):
    """Every tensor of every cache is compared after every round, bit for bit."""
    way, model = hybrid
    assert find_way(model) == way
    prompts = prompts_of_lengths(5, 17, 1, 11)
    expected = watch(monkeypatch, way)
    texts = [d.tokens for d in decode_plain(model, prompts, max_new_tokens=NEW)]
    everything = model.config.model_type == "qwen3_5_text"
    rejections, compared = Counter(), 0
    for pattern in PATTERNS if everything else ["half right"]:
        states, drafter = watch(monkeypatch, way), KnownDrafter(prompts, texts, PATTERNS[pattern], taps=(1, 2))
        decoded = decode_chain(model, prompts, drafter, None, draft_tokens=K, max_new_tokens=NEW)
        assert [d.tokens for d in decoded] == texts
        for text, tensors in states.items():
            assert len(tensors) == len(expected[text]) > 2
            assert all(torch.equal(a, b) for a, b in zip(tensors, expected[text]))
        compared += len(states)
        for d in decoded:
            rejections.update(accepted for accepted, judged in zip(d.accepted, d.judged) if accepted < judged)
        if pattern == "half right":
            assert texts == [generate(model, prompt, NEW) for prompt in prompts]
            check_features(model, drafter, prompts, texts)
            (alone,) = decode_chain(
                model, prompts[1:2], KnownDrafter(prompts[1:2], texts[1:2], PATTERNS[pattern], taps=(1, 2)), None,
                draft_tokens=K, max_new_tokens=NEW,
            )  # fmt: skip
            assert alone == decoded[1]
    if everything:
        assert sum(rejections.values()) >= 200 and compared >= 200 and set(rejections) == set(range(K))
    assert len(rejections) > 1


def check_features(model, drafter, prompts, texts):
    """The drafter was given each position once, in order, with the features of an uncached forward over the text."""
    for b, (prompt, text) in enumerate(zip(prompts, texts)):
        rows, whole = drafter.rows[b], prompt + text
        assert [position for position, *_ in rows] == list(range(len(rows)))
        assert [token for _, token, *_ in rows] == whole[1 : len(rows) + 1]
        with tap_hidden_states(model, drafter.taps) as recorder, torch.no_grad():
            model(torch.tensor([whole[: len(rows)]]), use_cache=False)
        torch.testing.assert_close(torch.stack([r[2] for r in rows]), recorder.taps[0], atol=5e-4, rtol=1e-3)
        torch.testing.assert_close(torch.stack([r[3] for r in rows]), recorder.final[0], atol=5e-4, rtol=1e-3)


def test_the_trial_tells_right_from_wrong(hybrid, llama):
    """Masking the padding and dropping slots is no way to decode a recurrent target, and nor is a block for Jamba."""
    way, model = hybrid
    assert not judges.attends_only(model) and try_way(model, CachedTarget) is not None
    assert (try_way(model, ReplayedTarget) is None) == (way == BLOCK)
    assert judges.attends_only(llama) and find_way(llama) == "one cache"
    assert all(try_way(llama, judge) is None for judge in judges.WAYS.values())


def test_no_way_at_all(monkeypatch):
    """A cache that is wrong in every way: the reason has the figures, and the run can go on without a judge."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), dtype=torch.float32).eval()
    forward = model.forward

    def forgetful(input_ids, past_key_values=None, use_cache=None, **options):
        return forward(input_ids, use_cache=use_cache, logits_to_keep=options.get("logits_to_keep", 0))

    monkeypatch.setattr(model, "forward", forgetful)
    with pytest.raises(NotJudged, match=r"one cache: logits off by \d.*%; replayed state: logits off by"):
        decode_plain(model, [[1, 2, 3]], max_new_tokens=4)
