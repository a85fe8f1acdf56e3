"""The data file that ships with the project, against the real target's tokenizer and weights."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from data_pipelines.conversations.config import DataConfig
from data_pipelines.conversations.greedy import agreement
from data_pipelines.conversations.prepare import prepare
from data_pipelines.conversations.prompts import DOMAINS, generate_prompts, split_of
from data_pipelines.conversations.rows import DEMO, read_rows
from data_pipelines.engines import TargetConfig, resolve_target


@pytest.fixture(scope="module")
def target():
    return resolve_target(TargetConfig(kind="smollm2_135m"))


def test_it_holds_the_first_generated_prompts_of_every_domain():
    rows = [row.data for row in read_rows("builtin:demo")]
    assert len(rows) >= 900 and DEMO.stat().st_size < 700_000
    assert [{**r, "messages": r["messages"][:-1]} for r in rows] == [
        {**prompt, "finish_reason": r["finish_reason"]} for prompt, r in zip(generate_prompts(len(rows), seed=0), rows)
    ]
    assert Counter(r["domain"] for r in rows) == dict.fromkeys(DOMAINS, len(rows) // len(DOMAINS))
    assert {split_of(r["messages"][0]["content"]) for r in rows} == {"train"}
    assert Counter(r["finish_reason"] for r in rows)["length"] < len(rows) / 10


def test_every_row_is_trained_on(tmp_path, target, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = target.load_tokenizer()
    prepared = prepare(DataConfig(path="builtin:demo", max_quarantined_fraction=0.01), tokenizer, tmp_path)
    counts = prepared.counts
    assert counts.rows == counts.documents + counts.quarantined and counts.quarantined <= 5 and counts.clipped == 0
    assert counts.supervised > 30_000
    rows = {f"builtin:demo:{i}": r.data for i, r in enumerate(read_rows("builtin:demo"), 1)}
    for document in prepared.documents[:100]:
        row = rows[document.origin]
        end = "<|im_end|>" if row["finish_reason"] == "stop" else ""
        assert tokenizer.decode(document.input_ids[document.loss_mask]) == row["messages"][-1]["content"] + end


def test_the_target_gives_its_answers_again(target):
    rows = sorted(read_rows("builtin:demo"), key=lambda r: len(r.data["messages"][-1]["content"]))
    rows = rows[len(rows) // 3 : len(rows) // 2]  # answers of some twenty tokens
    found = agreement(rows, target.load_model(torch.float32), target.load_tokenizer(), 4, max_new_tokens=96)
    assert (found.same, found.total) == (4, 4), found.mismatches
