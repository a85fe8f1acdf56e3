"""The numbers, on texts small enough to count by hand."""

from __future__ import annotations

import json

from trainer.decoding.chain import Decoded
from trainer.decoding.statistics import acceptance, first_difference


def test_counted_by_hand():
    # k = 3. First text, 8 tokens: one of the prefill; rounds commit 3 (2 drafts right), 1 (none), 3 (cut after 3 of 3).
    long = Decoded(list(range(8)), "length", accepted=[2, 0, 3], judged=[3, 3, 3])
    # Second text, 4 tokens: a round of 1, then one that ends after 2 with the end of sequence as its second draft.
    short = Decoded(list(range(4)), "stop", accepted=[0, 2], judged=[3, 2])
    nothing = Decoded([5], "stop")  # the prefill's token ended it: no round
    numbers = acceptance([long, short, nothing], 3)
    assert numbers == {
        "acceptance_length": (7 + 3) / 5,
        "acceptance_length_mean": (7 / 3 + 3 / 2) / 2,
        # Draft 1: right in 3 of 5 rounds. Draft 2: in 3 of 5. Draft 3: in 1 of the 4 rounds that had a place for it.
        "prefix_rate": [3 / 5, 3 / 5, 1 / 4],
        # Draft 2 after a right draft 1: 3 of 3. Draft 3 after two right ones, where it had a place: 1 of 2.
        "conditional_rate": [3 / 5, 1.0, 1 / 2],
        "prompts": 3,
        "rounds": 5,
        "tokens": 13,
    }
    json.dumps(numbers, allow_nan=False)


def test_nothing_is_null_not_nan():
    numbers = acceptance([Decoded([5], "stop")], 2)
    assert numbers["acceptance_length"] is None and numbers["acceptance_length_mean"] is None
    assert numbers["prefix_rate"] == numbers["conditional_rate"] == [None, None]
    never = acceptance([Decoded([1, 2], accepted=[0], judged=[1])], 2)
    assert never["prefix_rate"] == [0.0, None] and never["conditional_rate"] == [0.0, None]


def test_first_difference():
    expected = Decoded([1, 2, 3], margins=[0.5, 1e-6, 2.0])
    assert first_difference(expected, Decoded([1, 2, 3])) is None
    assert first_difference(expected, Decoded([1, 7, 3])) == {
        "position": 1,
        "expected": 2,
        "got": 7,
        "logit_gap": 1e-6,
    }
    assert first_difference(expected, Decoded([1, 2])) == {"position": 2, "expected": 3, "got": None, "logit_gap": 2.0}
    longer = first_difference(expected, Decoded([1, 2, 3, 4]))
    assert longer == {"position": 3, "expected": None, "got": 4, "logit_gap": None}
