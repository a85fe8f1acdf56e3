from __future__ import annotations

import copy
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines.conversations import shards
from data_pipelines.conversations.config import DataConfig
from data_pipelines.conversations.prepare import prepare
from data_pipelines.conversations.quarantine import Unrenderable
from data_pipelines.conversations.row_documents import row_documents
from data_pipelines.conversations.rows import Row
from data_pipelines.errors import UserError
from tests.data_pipelines.conversations.chat_templates import with_template
from tests.data_pipelines.conversations.template_texts import HEADERS, STRICT

USER = {"role": "user", "content": "Please count the apples"}
ANSWER = {"role": "assistant", "content": "Here are one two three"}
GOOD = {"messages": [USER, ANSWER]}
REQUEST = {"messages": [USER]}


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
        {"title": "no messages"},
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
    assert counts.repairs == {"turns after the last answer left out": 1} and counts.shapes == {"messages": 3}
    refused = [json.loads(line) for line in (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()]
    assert [r["origin"] for r in refused] == [f"{config.path}:{n}" for n in range(2, 7)]
    assert [r["reason"] for r in refused] == list(counts.examples)
    assert refused[0]["row"] == "{broken" and refused[1]["row"] == {"title": "no messages"}
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
    counts = prepared.counts
    assert (counts.clipped, counts.split, counts.quarantined) == (1, 0, 1)
    assert "no token is trained on within" in next(iter(counts.reasons))

    leave_out = replace(clip, too_long="quarantine", max_quarantined_fraction=0.7)
    counts = prepare(leave_out, tokenizer, tmp_path / "run").counts
    assert (counts.trained, counts.clipped, counts.left_out) == (1, 0, 0)
    assert counts.reasons == {"longer than data.max_document_tokens=40": 2}

    whole = prepare(replace(clip, max_document_tokens=1000), tokenizer, tmp_path / "run")
    pieces = prepare(replace(clip, too_long="split"), tokenizer, tmp_path / "run")
    assert pieces.counts.split == 2 and pieces.counts.trained == 3 and pieces.counts.left_out > 0
    assert pieces.counts.supervised == whole.counts.supervised
    assert all(len(d) <= 40 and d.loss_mask[1:].any() for d in pieces.documents)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(2, 12), st.sampled_from(["clip", "split"]))
def test_every_label_is_trained_on_once_however_a_document_is_cut(given_, most, too_long):
    mask = given_.draw(st.lists(st.booleans(), min_size=2, max_size=60))
    mask[0] = False
    ids = list(range(len(mask)))
    row = Row({"input_ids": ids, "loss_mask": mask}, "test:1")
    config = DataConfig(path="rows.jsonl", max_document_tokens=most, too_long=too_long)
    reached = mask if too_long == "split" else mask[:most]
    try:
        made = row_documents(row, range(1000), config)  # of the tokenizer only its size is asked
    except Unrenderable:
        assert not any(reached)
        return
    for piece, labels in made.documents:
        assert 2 <= len(piece) == len(labels) <= most and any(labels) and not labels[0]
        assert piece == list(range(piece[0], piece[0] + len(piece)))  # nothing is left out inside a piece
    assert [i for piece, labels in made.documents for i, label in zip(piece, labels) if label] == [
        i for i, label in enumerate(reached) if label
    ]
    assert (made.clipped, made.split) == ((len(ids) > most, 0) if too_long == "clip" else (0, len(ids) > most))


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


@pytest.mark.parametrize(
    "change",
    [
        {"max_document_tokens": 77},
        {"too_long": "split"},
        {"format": "messages"},
        {"pair": "title/body"},
        {"max_rows": 1},
        {"train_on": "last"},
        {"roles": ["assistant", "user"]},
        {"reasoning": "context"},
        {"max_quarantined_fraction": 0.9},
        {"workers": 1},
        {"pack_tokens": 4096},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_option_that_could_change_a_document_is_in_the_key(tmp_path, tokenizer, cache, change):
    config = data(tmp_path, [GOOD, {**GOOD, "title": "Who", "body": "one"}])
    prepare(config, tokenizer, tmp_path / "run")
    prepare(replace(config, **change), tokenizer, tmp_path / "run")
    free = {"max_quarantined_fraction", "workers", "pack_tokens"}
    assert built(cache) == (1 if free & change.keys() else 2)


def test_one_byte_of_the_file_or_one_token_of_the_tokenizer_is_another_key(tmp_path, tokenizer, cache):
    config = data(tmp_path, [GOOD] * 3)
    prepare(config, tokenizer, tmp_path / "run")
    raw = bytearray(Path(config.path).read_bytes())
    raw[raw.index(b"three")] = ord("T")
    stat = Path(config.path).stat()
    Path(config.path).write_bytes(raw)
    os.utime(config.path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as if it were untouched
    changed = prepare(config, tokenizer, tmp_path / "run")
    assert "Three" in tokenizer.decode(changed.documents[0].input_ids) and built(cache) == 2
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["apples"])
    prepare(config, other, tmp_path / "run")
    assert built(cache) == 3
    shutil.copy(config.path, tmp_path / "again.jsonl")  # origins name the file
    moved = prepare(replace(config, path=str(tmp_path / "again.jsonl")), tokenizer, tmp_path / "run")
    assert built(cache) == 4 and moved.documents[0].origin == f"{tmp_path}/again.jsonl:1"
    assert moved.fingerprint == changed.fingerprint


def test_a_file_in_which_one_row_in_five_is_broken_in_another_way(tmp_path, tokenizer):
    broken = [
        "{broken",
        "[1, 2]",
        '{"messages": [{"role": "user", "content": "\\ud83d"}]}',
        "\x00",
        {"messages": [ANSWER, USER]},
        {"messages": [USER, {"role": "assistant", "content": {"a": 1}}]},
        {"messages": {"role": "user"}},
        {"messages": [USER, {"role": 5, "content": "x"}]},
        {"prompt": 5, "completion": None},
        {"input_ids": [1, None]},
        {"request": REQUEST, "response": {"error": {"message": "overloaded"}}},
        {"messages": [USER, ANSWER], "conversations": []},
        {"text": ""},
        {"messages": [USER, ANSWER], "tools": "{not a list"},
    ]
    good = [GOOD, {"prompt": "Count", "completion": "one two"}, {"text": "one two three"}, {"input_ids": [4, 5, 6]}]
    lines = [x for i, bad in enumerate(broken * 30) for x in (*(good[(i + k) % 4] for k in range(4)), bad)]
    config = data(tmp_path, lines, workers=2)
    prepared = prepare(config, tokenizer, tmp_path / "run")
    counts = prepared.counts
    assert counts.rows == len(lines) == counts.trained + counts.quarantined
    assert counts.quarantined == 30 * len(broken) == sum(counts.reasons.values())
    assert counts.trained == len(prepared.documents) == sum(counts.shapes.values())
    refused = [json.loads(line) for line in (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()]
    assert [r["origin"] for r in refused] == [f"{config.path}:{n}" for n in range(5, len(lines) + 1, 5)]
    trained_on = [f"{config.path}:{n}" for n in range(1, len(lines) + 1) if n % 5]
    assert [d.origin for d in prepared.documents] == trained_on
    assert all(counts.examples[r["reason"]] for r in refused)


def test_a_run_of_bad_rows_is_stopped_before_all_are_read(tmp_path, tokenizer, cache):
    lines = ["{broken" if i % 3 else GOOD for i in range(20_000)]
    config = data(tmp_path, lines, workers=1)
    with pytest.raises(UserError) as error:
        prepare(config, tokenizer, tmp_path / "run")
    first = int(re.search(r"of the first (\d+) rows are quarantined", error.value.what)[1])
    assert 1000 <= first < 3000
    assert f"× the line is not JSON (first: {config.path}:2)" in error.value.what
    quarantined = (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()
    assert f"{len(quarantined)} of the first" in error.value.what
    # What was rendered until then is gone on from when the rest is wanted after all.
    (partial,) = cache.glob(".*.partial")
    begun = {p.name: p.stat().st_mtime_ns for p in (partial / "shards").glob("0*.safetensors")}
    rest = replace(config, max_quarantined_fraction=0.9, max_rows=0)
    prepared = prepare(rest, tokenizer, tmp_path / "run")
    assert begun and prepared.counts.rows == 20_000 and prepared.counts.trained == 6667
    assert not list(cache.glob(".*.partial"))


def test_a_file_that_is_written_to_while_it_is_read_is_refused(tmp_path, tokenizer, cache, monkeypatch):
    config = data(tmp_path, [GOOD] * 10)
    render = shards.row_documents

    def write_and_render(row, *rest):
        Path(config.path).write_text(json.dumps(GOOD))
        return render(row, *rest)

    monkeypatch.setattr(shards, "row_documents", write_and_render)
    with pytest.raises(UserError, match="changed while it was read"):
        prepare(config, tokenizer, tmp_path / "run")
    assert not [p for p in cache.iterdir() if p.is_dir()]
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert prepare(config, tokenizer, tmp_path / "run").counts.rows == 1


def test_a_few_bad_rows_at_the_start_do_not_stop_a_run(tmp_path, tokenizer):
    lines = ["{broken"] * 520 + [GOOD] * 2000  # more than half of the first block, and not surely of all
    assert prepare(data(tmp_path, lines, workers=1), tokenizer, tmp_path / "run").counts.quarantined == 520
