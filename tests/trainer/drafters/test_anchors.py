"""Which blocks a pack trains, and which token fills their empty slots."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines.errors import UserError
from tests.trainer.drafters.block_cases import make_drafter
from trainer.batch import round_counts
from trainer.drafters.blocks import draw_anchors
from trainer.drafters.dflash import DFlashConfig, choose_mask_token
from trainer.drafters.dspark import DSparkConfig


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


packs = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(packs, st.integers(1, 40), st.integers(0, 3))
def test_the_budget_is_shared_out_per_document(documents, budget, seed):
    candidates = torch.tensor([x for d in documents for x in d])
    ids = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor([len(d) for d in documents]))
    chosen = draw_anchors(candidates, ids, budget, generator(seed))
    assert not (chosen & ~candidates).any()
    assert chosen.sum() == min(budget, int(candidates.sum()))
    has, got = ([int((x & (ids == d)).sum()) for d in range(len(documents))] for x in (candidates, chosen))
    # Nobody has an anchor more than another who still had candidates, but for the last turn.
    assert all(got[a] == has[a] or got[a] >= got[b] - 1 for a in range(len(has)) for b in range(len(has)))


def test_every_candidate_is_drawn_equally_often():
    candidates, ids = torch.ones(30, dtype=torch.bool), torch.repeat_interleave(torch.arange(2), torch.tensor([10, 20]))
    drawn = sum(draw_anchors(candidates, ids, 10, generator(seed)).int() for seed in range(2000))
    assert drawn.sum() == 20_000  # five of ten, and five of twenty
    torch.testing.assert_close(drawn[:10] / 2000, torch.full((10,), 0.5), atol=0.06, rtol=0)
    torch.testing.assert_close(drawn[10:] / 2000, torch.full((20,), 0.25), atol=0.06, rtol=0)


def test_draws_are_addressed(target_config, world, frozen):
    drafter = make_drafter(target_config, "dflash", {"anchors": 6})

    def anchors(seed):
        made = world.make([20, 3, 9], mask="all")
        object.__setattr__(made.batch, "address", (0, seed))
        return drafter.rounds(made.batch)[0].nonzero().flatten().tolist()

    assert anchors(1) == anchors(1) and len(anchors(1)) == 6
    assert len({tuple(anchors(seed)) for seed in range(8)}) > 4
    assert all({20, 21} <= set(anchors(seed)) for seed in range(8))  # all that the short document has


def test_a_block_is_counted_whole(target_config, world):
    """Every draft that counts belongs to a drawn anchor, and all of a drawn anchor's drafts count that may."""
    drafter, made = make_drafter(target_config, "dflash", {"anchors": 4}), world.make([20, 3, 9], mask="random")
    counts, all_counts = drafter.rounds(made.batch), round_counts(made.batch, 0, drafter.depth)
    assert torch.equal(counts, all_counts & counts[0])


def tokenizer(size, added=None, **ids):
    special = dict.fromkeys(("mask_token_id", "pad_token_id", "unk_token_id", "eos_token_id")) | ids
    return SimpleNamespace(__len__=None, get_added_vocab=lambda: added or {}, size=size, **special)


class Sized(SimpleNamespace):
    def __len__(self):
        return self.size


@pytest.mark.parametrize(
    "rows,options,expected",
    [
        (120, {"mask_token_id": 7}, 100),
        (100, {"mask_token_id": 7, "eos_token_id": 1}, 7),
        (100, {"added": {"<|reserved_2|>": 92, "<|reserved_1|>": 91, "<s>": 1}, "pad_token_id": 5}, 91),
        (100, {"pad_token_id": 0, "eos_token_id": 3}, 0),
        (100, {"pad_token_id": 3, "unk_token_id": 4, "eos_token_id": 3}, 4),
        (100, {"pad_token_id": 3, "eos_token_id": 3}, 3),
    ],
)
def test_a_mask_token_is_chosen(rows, options, expected):
    given_ = Sized(**vars(tokenizer(100, **options)))
    assert choose_mask_token(given_, rows)[0] == expected
    assert DFlashConfig().completed(given_, rows).mask_token == expected
    assert DFlashConfig(mask_token=42).completed(given_, rows).mask_token == 42


def test_without_any_special_token_it_has_to_be_named():
    with pytest.raises(UserError, match=r"drafter\.mask_token"):
        DSparkConfig().completed(Sized(**vars(tokenizer(100))), 100)
    with pytest.raises(UserError, match="not in the target's vocabulary of 100"):
        DFlashConfig(mask_token=100).completed(Sized(**vars(tokenizer(100))), 100)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"slots": "anchor"}, "anchor_predicts, anchor_is_context"),
        ({"weighting": "linear"}, "exponential, dpace"),
        ({"block_size": 1}, "no slot that drafts"),
        ({"layer_types": ["sliding_attention"]}, "for each of the 5 layers"),
        ({"gamma": 0.0}, "positive"),
        ({"loss": "mse"}, "no loss 'mse'"),
    ],
)
def test_impossible_options(options, message):
    with pytest.raises(UserError) as error:
        DFlashConfig(**options)
    assert message in str(error.value)


def test_impossible_options_of_dspark():
    for options in ({"slots": "anchor_is_context"}, {"markov_head": "lstm"}, {"markov_rank": -1}):
        with pytest.raises(UserError):
            DSparkConfig(**options)


def test_more_drafts_than_a_block_holds(target_config, world, frozen):
    drafter = make_drafter(target_config, "dflash", {"block_size": 4})
    with pytest.raises(UserError, match="holds 3 drafts, not 4"):
        drafter.propose(drafter.new_state(1), None, frozen, 4)
