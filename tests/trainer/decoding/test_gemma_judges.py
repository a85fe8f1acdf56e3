"""DFlash for Gemma targets in transformers' own decoder. It embeds a block with the target's embedding *module*, which in
Gemma multiplies by √H; `speculators` and vLLM embed the plain rows, and so does this project. With plain rows transformers'
loop accepts, round by round, what ours accepts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from tests.trainer.decoding import test_transformers_judges
from tests.trainer.decoding.test_dflash_chain import in_transformers, trained
from tests.trainer.decoding.test_transformers_judges import judged
from tests.trainer.export.test_families import TARGETS, save
from trainer.decoding.chain import decode_chain, decode_plain
from trainer.drafters.dflash import DFlashConfig
from trainer.target import FrozenTarget

NEW, K = 24, 3
PROMPTS = [[5, 17, 3, 80, 2], [9, 11, 40]]  # the drafter has seen the first one


def plain_rows(self, noise_ids):
    return F.embedding(noise_ids, self.main_model_input_embeddings.weight)


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_with_plain_rows_transformers_accepts_the_same_drafts(tmp_path, monkeypatch, name):
    monkeypatch.setattr(test_transformers_judges, "NEW", NEW)
    target = save(TARGETS[name](), tmp_path / "target")
    model, frozen = target.load_model(torch.float32), FrozenTarget.load(target, torch.float32)
    model.generation_config.eos_token_id = None
    texts = [d.tokens for d in decode_plain(model, PROMPTS, max_new_tokens=NEW)]
    config = DFlashConfig(num_layers=1, mask_token=90, gamma=4.0, block_size=K + 1, taps=[1, 2, 3])
    drafter = trained(config, target, model, frozen, PROMPTS[:1], texts[:1])
    theirs = in_transformers(drafter)
    ours = [
        decode_chain(model, [prompt], drafter, frozen, draft_tokens=K, max_new_tokens=NEW)[0].accepted
        for prompt in PROMPTS
    ]
    assert len({k for counts in ours for k in counts}) >= 2, "hardly anything was compared"

    ids = torch.tensor([[3, 90]])
    embedding = SimpleNamespace(main_model_input_embeddings=model.get_input_embeddings())
    as_it_is = DFlashTokenCandidateGenerator._get_noise_embeds(embedding, ids)
    torch.testing.assert_close(as_it_is, plain_rows(embedding, ids) * target.config.hidden_size**0.5)

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "_get_noise_embeds", plain_rows)
    for prompt, plain, counts in zip(PROMPTS, texts, ours):
        text, accepted = judged(model, theirs, prompt, monkeypatch)
        assert text == plain
        assert accepted[:-1] == counts[:-1]  # the last round meets the end of the text, where both count differently
