"""Drafters that decode in transformers' own loop, with transformers' own model classes: round by round it accepts what ours
accepts. (The convention in which the anchor's slot does not draft, the one that transformers has, is judged in
`test_dflash_chain`; MTP heads in `tests/trainer/export/test_mtp_export`.)"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from tests.trainer.decoding.test_dflash_chain import COMMON, NEW, K, in_transformers, texts, trained  # noqa: F401
from tests.trainer.decoding.test_eagle3_chain import eos, frozen, model, prompts  # noqa: F401
from trainer.decoding.chain import decode_chain
from trainer.drafters.dflash import DFlashConfig


class AnchorPredicts(nn.Module):
    """transformers takes the drafts from slot 1 on. With a slot of nothing put before its states it takes them from the
    anchor's slot on, and the block drafts one more."""

    def __init__(self, theirs: nn.Module):
        super().__init__()
        self.theirs, self.config, self.device = theirs, theirs.config, theirs.device

    def forward(self, **arguments):
        out = self.theirs(**arguments)
        states = out.last_hidden_state
        out.last_hidden_state = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
        return out


@pytest.fixture(scope="module")
def drafter(tiny_target, model, frozen, prompts, texts):  # noqa: F811
    config = DFlashConfig(**COMMON, block_size=K, slots="anchor_predicts")
    return trained(config, tiny_target, model, frozen, prompts, texts)


def judged(model, theirs, prompt, monkeypatch) -> tuple[list[int], list[int]]:  # noqa: F811
    """What transformers writes, and how many drafts it accepts in each round."""
    accepted = []
    monkeypatch.setattr(
        DFlashTokenCandidateGenerator, "update_candidate_strategy", lambda *args: accepted.append(int(args[-1])), False
    )
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        assistant_model=theirs,
        speculation_type="dflash",
        do_sample=False,
        max_new_tokens=NEW,
    )
    return out[0, len(prompt) :].tolist(), accepted[1:]  # the first entry is the prefill


def test_the_anchor_predicts(model, frozen, prompts, eos, texts, drafter, monkeypatch):  # noqa: F811
    theirs, counts = AnchorPredicts(in_transformers(drafter)), []
    for prompt, text in zip(prompts, texts):
        written, accepted = judged(model, theirs, prompt, monkeypatch)
        assert written == text
        (ours,) = decode_chain(model, [prompt], drafter, frozen, draft_tokens=K, max_new_tokens=NEW, eos_ids=eos)
        assert (
            accepted[:-1] == ours.accepted[:-1]
        )  # the last round meets the end of the text, where both count differently
        counts += ours.accepted[:-1]
    assert len(set(counts)) >= 3 and max(counts) == K, "hardly anything was compared"


def test_the_judge_would_notice(model, frozen, prompts, eos, texts, drafter, monkeypatch):  # noqa: F811
    """Read with the other convention (its slots are off by one) the same weights have hardly a draft accepted."""
    theirs, differ = in_transformers(drafter), 0
    for prompt, text in zip(prompts, texts):
        written, accepted = judged(model, theirs, prompt, monkeypatch)
        assert written == text  # lossless all the same
        (ours,) = decode_chain(model, [prompt], drafter, frozen, draft_tokens=K, max_new_tokens=NEW, eos_ids=eos)
        differ += accepted[:-1] != ours.accepted[:-1] and sum(accepted) < sum(ours.accepted)
    assert differ == len(prompts)
