"""Draft caches in decoding: rejected slots and finished sequences leave them, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.trainer.decoding.decoding_cases import SHAPE
from trainer.decoding.chain import decode_chain, decode_plain
from trainer.drafters import build_drafter
from trainer.drafters.attention import CachedAttention
from trainer.drafters.dflash import BlockState, DFlashConfig
from trainer.drafters.dspark import DSparkConfig
from trainer.drafters.eagle3 import Eagle3Config
from trainer.drafters.mtp import MTPConfig
from trainer.target import FrozenTarget

NEW, K = 36, 4
BLOCKS = {"num_layers": 2, "mask_token": 0, "gamma": 4.0, "layer_types": ["full_attention", "sliding_attention"]}
CONFIGS = {
    "eagle3": Eagle3Config(steps=K, num_layers=2),
    "mtp": MTPConfig(steps=K, warm_start="never"),
    "mtp, chained": MTPConfig(steps=K, form="chained", warm_start="never"),
    "dflash": DFlashConfig(**BLOCKS, block_size=K + 1, sliding_window=9),
    "dspark": DSparkConfig(**BLOCKS, block_size=K, markov_rank=16, sliding_window=9),
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(**{**SHAPE, "max_position_embeddings": 256})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


@pytest.mark.parametrize("name", CONFIGS)
def test_slots_are_bounded_by_the_text(model, prompts, monkeypatch, name):
    """Of an untrained drafter every third round is made right; most drafts are rejected. One text ends early."""
    texts = [d.tokens for d in decode_plain(model, prompts, max_new_tokens=NEW)]
    early = [token for token in texts[1] if texts[1].index(token) > 8 and not all(token in text for text in texts)]
    eos = {early[0]}
    after = {text[i]: text[i + 1 : i + 1 + K] for text in texts for i in range(NEW - K)}
    torch.manual_seed(3)
    drafter = build_drafter(CONFIGS[name], model.config, None).eval()
    frozen, propose, seen = FrozenTarget(model), drafter.propose, []

    def watched(state, rows, frozen, k):
        drafts = propose(state, rows, frozen, k)
        if len(seen) % 3 == 0:
            last = [int(tokens[valid][-1]) for tokens, valid in zip(rows.next_tokens, rows.valid)]
            drafts = torch.tensor([after.get(token, wrong) for token, wrong in zip(last, drafts.tolist())])
        seen.append((slots(state), int(rows.positions.max()) + 1, len(rows.valid)))
        return drafts

    monkeypatch.setattr(drafter, "propose", watched)
    arguments = {"draft_tokens": K, "max_new_tokens": NEW, "eos_ids": eos}
    decoded = decode_chain(model, prompts, drafter, frozen, **arguments)
    assert any(d.finish_reason == "stop" for d in decoded) and any(d.finish_reason == "length" for d in decoded)
    accepted = [a for d in decoded for a in d.accepted]
    assert 0 in accepted and K in accepted
    for held, longest, _ in seen:
        assert held <= longest + K, (held, longest)
    assert seen[0][2] == len(prompts) and seen[-1][2] < len(prompts)  # who has finished is drafted for no more

    bounded, seen[:] = [held for held, *_ in seen], []
    monkeypatch.setattr(CachedAttention, "_compact", lambda self: None)
    monkeypatch.setattr(BlockState, "drop_rejected", lambda self: None)
    assert decode_chain(model, prompts, drafter, frozen, **arguments) == decoded
    assert seen[-1][0] > 1.5 * bounded[-1]


def slots(state) -> int:
    """The most that one of the state's caches holds."""
    if isinstance(state, BlockState):
        assert {x.shape[-2] for a in state.attentions for x in (a._keys, a._values)} == {state.valid.shape[1]}
        return state.valid.shape[1]
    return max(cache._keys.shape[-2] for cache in state.caches)
