from __future__ import annotations

from collections import Counter

import pytest

from data_pipelines.conversations.prompts import DOMAINS, generate_prompts, split_of
from data_pipelines.errors import UserError


def texts(rows: list[dict]) -> list[str]:
    return [row["messages"][0]["content"] for row in rows]


def test_thousands_without_repetition_in_equal_shares():
    rows = generate_prompts(6000, seed=0)
    assert len(set(texts(rows))) == len({row["id"] for row in rows}) == 6000
    assert Counter(row["domain"] for row in rows) == dict.fromkeys(DOMAINS, 1200)
    assert all([m["role"] for m in row["messages"]] == ["user"] for row in rows)


def test_the_seed_decides():
    assert generate_prompts(200, seed=3) == generate_prompts(200, seed=3)
    assert generate_prompts(200, seed=3)[:50] == generate_prompts(50, seed=3)
    assert len(set(texts(generate_prompts(200, seed=3))) & set(texts(generate_prompts(200, seed=4)))) < 100


def test_held_out_prompts_are_never_trained_on_whatever_the_seeds():
    train = {text for seed in range(4) for text in texts(generate_prompts(4000, seed, "train"))}
    held_out = {text for seed in range(4) for text in texts(generate_prompts(800, seed, "eval"))}
    assert len(train) > 6000 and len(held_out) > 1000
    assert not train & held_out
    assert {split_of(t) for t in train} == {"train"} and {split_of(t) for t in held_out} == {"eval"}


def test_more_than_the_templates_can_make_is_refused_with_the_number_that_they_can():
    with pytest.raises(UserError, match="different eval prompts") as error:
        generate_prompts(100_000, 0, "eval")
    most = int(error.value.fix.split("data.max_rows to ")[1].split(",")[0])
    assert len(generate_prompts(most, 0, "eval")) == most
