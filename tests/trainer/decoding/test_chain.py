"""Speculative decoding writes what plain greedy decoding writes, and counts what it accepts correctly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from data_pipelines.engines.anatomy import tap_hidden_states
from data_pipelines.errors import UserError
from tests.trainer.decoding.decoding_cases import SHAPE, KnownDrafter, build
from trainer.decoding.chain import context_limit, decode_chain, decode_plain
from trainer.decoding.target_cache import CachedTarget

NEW = 24
K = 4


def generate(model, prompt, max_new_tokens, eos_ids=()):
    """The judge: transformers' own greedy decoding of one prompt."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(eos_ids) or None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def texts(model, prompts):
    return [generate(model, prompt, NEW) for prompt in prompts]


def mixture(i, j):
    """A fixed irregular pattern of right and wrong drafts."""
    return (i * 7 + j * 5) % 11 in (0, 3, 4, 9)


PATTERNS = {
    "always right": lambda i, j: False,
    "always wrong": lambda i, j: True,
    "wrong at slot 0": lambda i, j: j == 1,
    "wrong at the last slot": lambda i, j: j == K,
    "mixture": mixture,
}


def test_plain_equals_generate(model, prompts, texts):
    plain = decode_plain(model, prompts, max_new_tokens=NEW)
    assert [d.tokens for d in plain] == texts
    assert [d.rounds for d in plain] == [NEW - 1] * len(prompts)
    assert all(len(d.margins) == NEW and min(d.margins) > 0 for d in plain)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_text_is_the_targets_own(model, prompts, texts, pattern):
    drafter = KnownDrafter(prompts, texts, PATTERNS[pattern])
    decoded = decode_chain(model, prompts, drafter, None, draft_tokens=K, max_new_tokens=NEW)
    assert [d.tokens for d in decoded] == texts
    if pattern == "always right":
        # 23 tokens after the prefill's one: four rounds of 4 drafts and a bonus, then 3 of the last 4 drafts.
        assert decoded[0].accepted == [K] * 4 + [3]
        assert decoded[0].judged == [K] * 4 + [3]
    if pattern in ("always wrong", "wrong at slot 0"):
        assert all(d.accepted == [0] * (NEW - 1) for d in decoded)
        assert decoded[0].judged == [K] * 20 + [3, 2, 1]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_accepted_is_what_the_pattern_says(llama, prompts, pattern):
    """Acceptance re-derived from nothing but the text and the pattern."""
    wrong = PATTERNS[pattern]
    plain = [d.tokens for d in decode_plain(llama, prompts, max_new_tokens=NEW)]
    decoded = decode_chain(
        llama, prompts, KnownDrafter(prompts, plain, wrong), None, draft_tokens=K, max_new_tokens=NEW
    )
    for d in decoded:
        bonus, expected, judged = 0, [], []
        while bonus < NEW - 1:
            right = next((j - 1 for j in range(1, K + 1) if wrong(bonus, j)), K)
            expected.append(min(right, NEW - 1 - bonus))
            judged.append(min(K, NEW - 1 - bonus))
            bonus += right + 1
        assert (d.accepted, d.judged) == (expected, judged)


@pytest.mark.parametrize("lucky", range(4))
def test_one_sequence_always_right_the_others_wrong(llama, prompts, lucky):
    """Also when the longest prompt keeps every slot, so that the cache as a whole has none to give back."""
    plain = [d.tokens for d in decode_plain(llama, prompts, max_new_tokens=NEW)]
    hopeless = [text if b == lucky else [(token + 1) % 96 for token in text] for b, text in enumerate(plain)]
    drafter = KnownDrafter(prompts, hopeless)
    decoded = decode_chain(llama, prompts, drafter, None, draft_tokens=K, max_new_tokens=NEW)
    assert [d.tokens for d in decoded] == plain
    assert [sum(d.accepted) > 0 for d in decoded] == [b == lucky for b in range(4)]


def test_batched_equals_one_by_one(llama, prompts):
    plain = [d.tokens for d in decode_plain(llama, prompts, max_new_tokens=NEW)]
    arguments = {"draft_tokens": K, "max_new_tokens": NEW, "eos_ids": {plain[1][9]}}
    together = decode_chain(llama, prompts, KnownDrafter(prompts, plain, mixture), None, **arguments)
    for prompt, text, decoded in zip(prompts, plain, together):
        (alone,) = decode_chain(llama, [prompt], KnownDrafter([prompt], [text], mixture), None, **arguments)
        assert alone == decoded


@pytest.mark.parametrize("place", range(0, 12))
@pytest.mark.parametrize("pattern", ["always right", "mixture"])
def test_end_of_sequence_anywhere_in_a_block(llama, prompts, place, pattern):
    plain = [generate(llama, prompt, NEW) for prompt in prompts]
    eos = {plain[0][place]}
    drafter = KnownDrafter(prompts, plain, PATTERNS[pattern])
    decoded = decode_chain(llama, prompts, drafter, None, draft_tokens=K, max_new_tokens=NEW, eos_ids=eos)
    for text, d in zip(plain, decoded):
        end = next((i + 1 for i, token in enumerate(text) if token in eos), NEW)
        assert d.tokens == text[:end]
        assert d.finish_reason == ("stop" if d.tokens[-1] in eos else "length")
        assert sum(d.accepted) <= len(d.tokens) - 1 and all(a <= j for a, j in zip(d.accepted, d.judged))
    assert decoded[0].finish_reason == "stop"


@pytest.mark.parametrize("max_new_tokens", [0, 1, 2, 4, 5, 6, 7, 10, 11])
def test_max_new_tokens_anywhere_in_a_block(llama, prompts, max_new_tokens):
    plain = [d.tokens for d in decode_plain(llama, prompts, max_new_tokens=NEW)]
    for pattern in PATTERNS.values():
        drafter = KnownDrafter(prompts, plain, pattern)
        decoded = decode_chain(llama, prompts, drafter, None, draft_tokens=K, max_new_tokens=max_new_tokens)
        assert [d.tokens for d in decoded] == [text[:max_new_tokens] for text in plain]


def test_context_at_its_maximum(model):
    """Texts that run into the last position that the target has; one prompt leaves no room at all."""
    rng = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 96, (n,), generator=rng).tolist() for n in (64, 63, 62, 59, 50)]
    texts = [generate(model, prompt, 64 - len(prompt)) if len(prompt) < 64 else [] for prompt in prompts]
    for pattern in PATTERNS.values():
        decoded = decode_chain(
            model, prompts, KnownDrafter(prompts, texts, pattern), None, draft_tokens=K, max_new_tokens=NEW
        )
        assert [d.tokens for d in decoded] == texts
    assert [d.tokens for d in decode_plain(model, prompts, max_new_tokens=NEW)] == texts


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_text_ends_before_the_factors_of_its_rope_change(kind):
    """Past that length the keys of the cache are not those of a new forward."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 2.0}
    if kind == "longrope":
        rope.update(short_factor=[1.0] * 4, long_factor=[4.0] * 4)
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, rope_parameters=rope)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    assert context_limit(model) == 32
    (decoded,) = decode_plain(model, [[5] * 10], max_new_tokens=40)
    assert decoded.tokens == generate(model, [5] * 10, 22)
    assert context_limit(build("llama")) == 64


def test_committed_rows_are_the_targets_features(model, prompts, texts):
    """The drafter is given each position once, in order, with the features of an uncached forward over the text."""
    drafter = KnownDrafter(prompts, texts, mixture)
    decode_chain(model, prompts, drafter, None, draft_tokens=K, max_new_tokens=NEW)
    for b, (prompt, text) in enumerate(zip(prompts, texts)):
        rows = drafter.rows[b]
        whole = prompt + text
        assert [position for position, *_ in rows] == list(range(len(rows)))
        assert [token for _, token, *_ in rows] == whole[1 : len(rows) + 1]
        assert len(rows) > len(prompt) + NEW - K - 2
        with tap_hidden_states(model, drafter.taps) as recorder:
            model(torch.tensor([whole[: len(rows)]]))
        torch.testing.assert_close(torch.stack([r[2] for r in rows]), recorder.taps[0], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(torch.stack([r[3] for r in rows]), recorder.final[0], atol=2e-4, rtol=1e-4)


@settings(max_examples=25, deadline=None)
@given(
    pattern=st.lists(st.booleans(), min_size=1, max_size=40),
    k=st.integers(1, 9),
    new=st.integers(1, 20),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
)
def test_any_pattern_any_shape(pattern, k, new, lengths):
    model = build("qwen3")
    rng = torch.Generator().manual_seed(sum(lengths))
    prompts = [torch.randint(0, 96, (n,), generator=rng).tolist() for n in lengths]
    plain = [d.tokens for d in decode_plain(model, prompts, max_new_tokens=new)]
    drafter = KnownDrafter(prompts, plain, lambda i, j: pattern[(i * k + j) % len(pattern)])
    decoded = decode_chain(model, prompts, drafter, None, draft_tokens=k, max_new_tokens=new)
    assert [d.tokens for d in decoded] == plain


def test_impossible_requests(llama):
    with pytest.raises(UserError, match="prompt of 0 tokens"):
        decode_plain(llama, [[]], max_new_tokens=4)
    with pytest.raises(UserError, match="prompt of 65 tokens"):
        decode_plain(llama, [[1] * 65], max_new_tokens=4)
    with pytest.raises(UserError, match="draft_tokens is 0"):
        decode_chain(llama, [[1]], None, None, draft_tokens=0, max_new_tokens=4)


def test_rejected_slots_do_not_pile_up(llama):
    """After a round the cache is as long as its longest sequence, and finished sequences are out of it."""
    target = CachedTarget(llama, None)
    everything = torch.ones(3, 5, dtype=torch.bool)
    step = target.forward(torch.zeros(3, 5, dtype=torch.long), torch.arange(5).expand(3, 5), everything)
    kept = torch.arange(5) < torch.tensor([[1], [3], [5]])
    target.keep(step, kept, torch.tensor([0, 1]))
    assert target.cache.get_seq_length() == 3
    assert target.slots.tolist() == [[False, False, True], [True, True, True]]
    assert target.cache.layers[0].keys.shape[0] == 2
