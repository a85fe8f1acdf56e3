"""Chains drafted by DFlash and DSpark, trained for seconds, on the tiny target; and DFlash as transformers decodes it."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator
from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from data_pipelines.engines.anatomy import tap_hidden_states
from tests.trainer.decoding.test_eagle3_chain import eos, from_scratch, frozen, model, prompts  # noqa: F401
from trainer.batch import Batch
from trainer.decoding.chain import decode_chain, decode_plain
from trainer.drafters import build_drafter
from trainer.drafters.dflash import DFlashConfig
from trainer.drafters.dspark import DSparkConfig

NEW, K = 40, 4  # from_scratch drafts as many
COMMON = {"num_layers": 2, "mask_token": 0, "gamma": 4.0}
CONFIGS = {
    "dflash": DFlashConfig(**COMMON, block_size=K + 1),
    "dflash, anchor predicts, sliding": DFlashConfig(
        **COMMON,
        block_size=K,
        slots="anchor_predicts",
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=16,
    ),
    "dspark": DSparkConfig(**COMMON, block_size=K, markov_rank=16),
    "dspark, rnn": DSparkConfig(**COMMON, block_size=K, markov_rank=16, markov_head="rnn"),
}


@pytest.fixture(scope="module")
def texts(model, prompts, eos):  # noqa: F811
    return [d.tokens for d in decode_plain(model, prompts, max_new_tokens=NEW, eos_ids=eos)]


@pytest.fixture(scope="module", params=CONFIGS)
def drafter(request, tiny_target, model, frozen, prompts, texts):  # noqa: F811
    return trained(CONFIGS[request.param], tiny_target, model, frozen, prompts, texts)


def trained(config, target, model, frozen, prompts, texts):  # noqa: F811
    """On the target's own answers to these very prompts, so that many drafts will be right and some wrong."""
    torch.manual_seed(0)
    built = build_drafter(config, target.config, None)
    batches = []
    for prompt, text in zip(prompts, texts):
        ids = torch.tensor(prompt + text)
        with tap_hidden_states(model, built.taps) as recorder, torch.no_grad():
            model(ids[None], use_cache=False)
        n = len(ids)
        batches.append(
            Batch(ids, torch.zeros(n).long(), torch.arange(n), torch.arange(n) >= len(prompt),
                  recorder.taps[0], recorder.final[0])
        )  # fmt: skip
    optimizer = torch.optim.AdamW(built.parameters(), lr=3e-3)
    for _ in range(20):
        for batch in batches:
            targets = built.targets(batch, frozen)
            weights = torch.tensor(built.step_weights) / built.divisors(targets.denominators).float()
            built(batch, targets, frozen, weights)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
    return built.eval()


def test_text_and_acceptance(model, frozen, prompts, eos, texts, drafter):  # noqa: F811
    decoded = decode_chain(model, prompts, drafter, frozen, draft_tokens=K, max_new_tokens=NEW, eos_ids=eos)
    for prompt, text, d in zip(prompts, texts, decoded):
        assert d.tokens == text
        assert (d.tokens, d.accepted) == from_scratch(model, prompt, drafter, frozen, eos)
        (alone,) = decode_chain(model, [prompt], drafter, frozen, draft_tokens=K, max_new_tokens=NEW, eos_ids=eos)
        assert alone == d
    rate = sum(sum(d.accepted) for d in decoded) / sum(d.rounds for d in decoded)
    assert 0.5 < rate < K and len({a for d in decoded for a in d.accepted}) >= 3  # else nothing much was compared


def in_transformers(drafter) -> MuseGlimmerAssistantModel:
    """The same weights in the DFlash drafter that transformers has (of another family, but of this shape)."""
    shape = drafter.layer_config
    config = MuseGlimmerAssistantConfig(
        **{
            key: getattr(shape, key)
            for key in (
                "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                "head_dim", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "layer_types",
            )
        },
        block_size=drafter.config.block_size,
        mask_token_id=drafter.config.mask_token,
        target_layer_ids=[k - 1 for k in drafter.taps],  # theirs name a layer by its number, from 0
    )  # fmt: skip
    theirs = MuseGlimmerAssistantModel(config).eval()
    names = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    state = {}
    for name, tensor in drafter.state_dict().items():
        if name.startswith("rotary."):
            continue
        for ours, other in names.items():
            name = other + name.removeprefix(ours) if name.startswith(ours) else name
        state[name] = tensor
    theirs.load_state_dict(state)
    return theirs


@pytest.mark.parametrize("drafter", ["dflash"], indirect=True)
def test_transformers_accepts_the_same_drafts(model, frozen, prompts, eos, texts, drafter, monkeypatch):  # noqa: F811
    accepted = []
    monkeypatch.setattr(
        DFlashTokenCandidateGenerator, "update_candidate_strategy", lambda *args: accepted.append(int(args[-1])), False
    )
    theirs = in_transformers(drafter)
    for prompt, text in zip(prompts, texts):
        accepted.clear()
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            assistant_model=theirs,
            speculation_type="dflash",
            do_sample=False,
            max_new_tokens=NEW,
        )
        assert out[0, len(prompt) :].tolist() == text
        (ours,) = decode_chain(model, [prompt], drafter, frozen, draft_tokens=K, max_new_tokens=NEW, eos_ids=eos)
        # Their first entry is the prefill; the last round meets the end of the text, where both count differently.
        assert accepted[1:-1] == ours.accepted[:-1]
