"""Rule 1: the mask is on the round."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.batch import Batch, round_counts, supervised_run


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
