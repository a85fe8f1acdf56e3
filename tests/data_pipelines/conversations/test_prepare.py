from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_pipelines.conversations.config import DataConfig
from data_pipelines.conversations.prepare import prepare
from data_pipelines.conversations.rows import read_rows
from data_pipelines.errors import UserError
from tests.data_pipelines.conversations.chat_templates import HEADERS, STRICT, with_template

USER = {"role": "user", "content": "Please count the apples"}
ANSWER = {"role": "assistant", "content": "Here are one two three"}
GOOD = {"messages": [USER, ANSWER]}


@pytest.fixture(scope="module")
def tokenizer(tiny_target):
    return tiny_target.load_tokenizer()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "draftsmith" / "documents"


def data(tmp_path: Path, lines: list, **options) -> DataConfig:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return DataConfig(path=str(file), **options)


def built(cache: Path) -> int:
    return sum(p.is_dir() for p in cache.iterdir()) if cache.exists() else 0


def test_every_row_is_trained_on_or_quarantined_with_its_reason(tmp_path, tokenizer):
    lines = [
        GOOD,
        "{broken",
        {"text": "no messages"},
        {"messages": []},
        {"messages": [ANSWER]},
        {"messages": [USER, {"role": "assistant", "content": "  "}]},
        {"messages": [USER, ANSWER, USER]},
        {**GOOD, "finish_reason": "length"},
    ]
    config = data(tmp_path, lines, max_quarantined_fraction=0.9)
    prepared = prepare(config, tokenizer, tmp_path / "run")
    counts = prepared.counts
    assert (counts.rows, counts.trained, counts.quarantined, counts.documents) == (8, 3, 5, 3)
    assert sum(counts.reasons.values()) == counts.quarantined
    assert counts.repairs == {"turns after the last answer left out": 1}
    refused = [json.loads(line) for line in (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()]
    assert [r["origin"] for r in refused] == [f"{config.path}:{n}" for n in range(2, 7)]
    assert [r["reason"] for r in refused] == list(counts.examples)
    assert refused[0]["row"] == "{broken" and refused[1]["row"] == {"text": "no messages"}
    assert [d.origin for d in prepared.documents] == [f"{config.path}:{n}" for n in (1, 7, 8)]
    whole, _, cut = prepared.documents
    assert tokenizer.decode(whole.input_ids[whole.loss_mask]) == "Here are one two three<|im_end|>"
    assert tokenizer.decode(cut.input_ids[cut.loss_mask]) == "Here are one two three"
    assert whole.input_ids.dtype == np.int32 and whole.loss_mask.dtype == np.bool_
    assert counts.tokens == sum(map(len, prepared.documents))
    assert counts.supervised == sum(int(d.loss_mask.sum()) for d in prepared.documents)


def test_what_the_template_refuses_is_quarantined(tmp_path, tokenizer):
    config = data(tmp_path, [GOOD, {"messages": [USER, USER, ANSWER]}])
    counts = prepare(config, with_template(tokenizer, STRICT), tmp_path / "run").counts
    assert counts.trained == 1 and "roles must alternate" in next(iter(counts.reasons))


def test_long_documents_are_a_choice_and_counted(tmp_path, tokenizer):
    long = {"messages": [USER, {"role": "assistant", "content": "one two three " * 30}]}
    late = {"messages": [{"role": "user", "content": "apples " * 60}, ANSWER]}
    clip = data(tmp_path, [GOOD, long, late], max_document_tokens=40)
    prepared = prepare(clip, tokenizer, tmp_path / "run")
    assert [len(d) <= 40 for d in prepared.documents] == [True, True]
    assert len(prepared.documents[1]) == 40 and prepared.documents[1].loss_mask[-1]
    assert (prepared.counts.clipped, prepared.counts.quarantined) == (1, 1)
    assert "no answer within" in next(iter(prepared.counts.reasons))
    leave_out = replace(clip, long_documents="quarantine", max_quarantined_fraction=0.7)
    counts = prepare(leave_out, tokenizer, tmp_path / "run").counts
    assert (counts.trained, counts.clipped) == (1, 0)
    assert counts.reasons == {"longer than data.max_document_tokens=40": 2}


def test_too_many_quarantined_rows_stop_the_run_with_reasons_and_examples(tmp_path, tokenizer):
    config = data(tmp_path, [GOOD, {"messages": []}, {"messages": []}, {"text": 1}])
    with pytest.raises(UserError) as error:
        prepare(config, tokenizer, tmp_path / "run")
    assert "3 of 4 rows are quarantined" in error.value.what
    assert f"2 × the conversation is empty (first: {config.path}:2)" in error.value.what
    assert len((tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()) == 3
    assert prepare(replace(config, max_quarantined_fraction=0.75), tokenizer, tmp_path / "run").counts.trained == 1


def test_nothing_to_train_on_is_an_error_whatever_the_limit(tmp_path, tokenizer):
    with pytest.raises(UserError, match="no token to train on") as error:
        prepare(data(tmp_path, [{"messages": [USER]}], max_quarantined_fraction=1.0), tokenizer, tmp_path / "run")
    assert "regenerate" in error.value.fix
    with pytest.raises(UserError, match="no rows"):
        prepare(data(tmp_path, []), tokenizer, tmp_path / "run")
    with pytest.raises(UserError, match="does not exist"):
        prepare(DataConfig(path=str(tmp_path / "nowhere.jsonl")), tokenizer, tmp_path / "run")


def test_the_cache_is_hit_by_the_same_content_only(tmp_path, tokenizer, cache):
    config = data(tmp_path, [GOOD, {"messages": []}])
    first = prepare(config, tokenizer, tmp_path / "a")
    again = prepare(config, tokenizer, tmp_path / "b")
    assert built(cache) == 1
    assert first.fingerprint == again.fingerprint and first.counts == again.counts
    assert all(np.array_equal(x.input_ids, y.input_ids) for x, y in zip(first.documents, again.documents))
    assert (tmp_path / "b" / "quarantine.jsonl").read_text() == (tmp_path / "a" / "quarantine.jsonl").read_text() != ""
    tokenizer(["a", "longer text"], padding=True)  # leaves its state in the tokenizer
    prepare(config, tokenizer, tmp_path / "b")
    assert built(cache) == 1

    changed = prepare(config, with_template(tokenizer, HEADERS), tmp_path / "b")
    assert built(cache) == 2 and changed.fingerprint != first.fingerprint
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = template.replace("<|im_end|>\n", "<|im_end|>")
        assert tokenizer.chat_template != template
        prepare(config, tokenizer, tmp_path / "b")
    finally:
        tokenizer.chat_template = template
    assert built(cache) == 3
    prepare(replace(config, max_document_tokens=60), tokenizer, tmp_path / "b")
    assert built(cache) == 4
    config = data(tmp_path, [GOOD, {"messages": [USER, {**ANSWER, "content": "Here"}]}])
    assert prepare(config, tokenizer, tmp_path / "b").counts.trained == 2
    assert built(cache) == 5
    assert (tmp_path / "b" / "quarantine.jsonl").read_text() == ""
    prepare(replace(config, pack_tokens=4096), tokenizer, tmp_path / "b")  # packing is not tokenising
    assert built(cache) == 5


def test_given_rows_take_the_place_of_the_path(tmp_path, tokenizer):
    rows = list(read_rows(data(tmp_path, [GOOD] * 3).path))
    assert len(prepare(DataConfig(path="nowhere"), tokenizer, tmp_path / "run", rows=rows).documents) == 3
