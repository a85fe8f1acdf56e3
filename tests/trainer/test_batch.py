"""Rule 1: the mask is on the round."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines.features import FeatureSpec
from trainer.batch import Batch, round_counts, supervised_run
from trainer.drafters import build_drafter
from trainer.drafters.dflash import DFlashConfig
from trainer.drafters.dspark import DSparkConfig
from trainer.drafters.eagle3 import Eagle3Config
from trainer.drafters.mtp import MTPConfig


def batch_of(documents: list[list[bool]]) -> Batch:
    lengths = [len(d) for d in documents]
    size = sum(lengths)
    return Batch(
        input_ids=torch.zeros(size, dtype=torch.long),
        document_ids=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
        positions=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])),
        supervised=torch.tensor([x for d in documents for x in d]),
        taps=torch.zeros(size, 1, 1),
        final=torch.zeros(size, 1),
    )


masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=5)


@settings(max_examples=200, deadline=None)
@given(masks, st.integers(0, 1), st.integers(1, 5))
def test_a_draft_counts_iff_its_whole_round_is_supervised_and_of_one_document(documents, first, depth):
    counts = round_counts(batch_of(documents), first, depth)
    expected = torch.zeros_like(counts)
    start = 0
    for mask in documents:
        for t in range(len(mask)):
            for k in range(depth):
                round_tokens = range(t + first, t + first + 2 + k)  # the bonus token and every label up to this one
                expected[k, start + t] = all(j < len(mask) and mask[j] for j in round_tokens)
        start += len(mask)
    assert torch.equal(counts, expected)


def test_the_first_draft_after_the_prompt_counts_and_nothing_past_the_end_of_turn():
    #                prompt             answer            after the end of turn
    mask = [False, False, False, True, True, True, False, False]
    counts = round_counts(batch_of([mask]), first=1, depth=2)
    # Row 2 is the prompt's last: its bonus token is the answer's first, its first draft the answer's second.
    assert counts[0].nonzero().flatten().tolist() == [2, 3]
    assert counts[1].nonzero().flatten().tolist() == [2]


def test_runs_end_at_documents():
    assert supervised_run(batch_of([[True, True], [True, False, True]])).tolist() == [1, 2, 1, 0, 1]


@pytest.mark.parametrize(
    "config",
    [
        Eagle3Config(steps=3),
        MTPConfig(steps=2, warm_start="never"),
        DFlashConfig(num_layers=1, mask_token=5, block_size=4),
        DSparkConfig(num_layers=1, mask_token=5, block_size=4),
    ],
    ids=lambda config: config.name,
)
def test_a_weightless_batch_adds_nothing_at_all(world, target_config, config):
    drafter = build_drafter(config, target_config, None).double()
    drafter.start_head(world.frozen)
    pack = world.make([9, 5], mask="all").pack
    taps = type(drafter).contract(config, target_config.num_hidden_layers).taps
    spec = FeatureSpec("t", taps, target_config.hidden_size, "float64")
    batch = Batch.weightless(pack, spec, dtype=torch.double, device="cpu", address=(0,))
    targets = drafter.targets(batch, world.frozen)
    assert not targets.denominators.any()
    loss, sums = drafter(batch, targets, world.frozen, torch.ones(drafter.depth))
    loss.backward()
    assert loss.item() == 0 and not sums.any()
    gradients = [p.grad for p in drafter.parameters() if p.grad is not None]
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients)
