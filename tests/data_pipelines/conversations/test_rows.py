from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_pipelines.conversations.rendering import Unrenderable
from data_pipelines.conversations.rows import Row, conversation, read_rows
from data_pipelines.errors import UserError

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be kind"}


def row(data) -> Row:
    return Row(data, "test:1")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({}, "has no messages"),
        ({"messages": None}, "has no messages"),
        ({"messages": "Hi"}, "not a list"),
        ({"messages": []}, "empty"),
        ({"messages": ["Hi"]}, "not an object"),
        ({"messages": [ANSWER, USER, ANSWER]}, "starts with an assistant"),
        ({"messages": [SYSTEM, ANSWER]}, "starts with an assistant"),
        ({"messages": [USER]}, "no assistant turn"),
        ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, "an answer is empty"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "has no text"),
        ({"messages": [USER, {"role": "tool", "content": "1"}, ANSWER]}, "unknown role 'tool'"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"name": "f"}]}]}, "calls tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}, "not text"),
    ],
)
def test_each_unusable_row_has_its_reason(data, reason):
    with pytest.raises(Unrenderable, match=reason):
        conversation(row(data))


def test_repairs_are_named():
    shared = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    repaired = conversation(row(shared))
    assert repaired.messages == [USER, ANSWER]
    assert repaired.repairs == [
        "conversations read as messages",
        "from/value read as role/content",
        "role gpt read as assistant",
        "role human read as user",
    ]
    parts = {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}
    assert conversation(row({"messages": [parts, ANSWER]})).messages == [USER, ANSWER]
    left_out = conversation(row({"messages": [USER, ANSWER, USER]}))
    assert left_out.messages == [USER, ANSWER] and left_out.repairs == ["turns after the last answer left out"]


def test_what_a_template_may_render_is_left_alone():
    messages = [SYSTEM, USER, USER, ANSWER, SYSTEM, USER, ANSWER]
    whole = conversation(row({"messages": messages, "tools": "[]", "finish_reason": "length"}))
    assert (whole.messages, whole.truncated, whole.repairs) == (messages, True, [])
    assert conversation(row({"messages": [USER]}), answered=False).messages == [USER]


def test_every_line_of_a_file_is_a_row_or_a_problem(tmp_path):
    file = tmp_path / "rows.jsonl"
    good = json.dumps({"messages": [USER, ANSWER]}).encode()
    file.write_bytes(b"\xef\xbb\xbf" + good + b"\n\n{broken\n[1]\n\xff\xfe\n" + good)
    rows = list(read_rows(str(file)))
    assert [r.origin.rsplit(":", 1)[1] for r in rows] == ["1", "3", "4", "5", "6"]
    not_ours = ["the line is not JSON", "the line is not a JSON object", "the line is not UTF-8"]
    assert [r.problem for r in rows] == ["", *not_ours, ""]
    assert len(list(read_rows(str(file), max_rows=2))) == 2


def test_what_does_not_exist_is_refused_before_anything_is_read(tmp_path):
    for path in ("nowhere.jsonl", "builtin:what", "builtin:prompts", f"hf:{tmp_path}/nothing"):
        with pytest.raises(UserError):
            read_rows(path)


def test_a_dataset_with_a_messages_column(tmp_path):
    Path(tmp_path / "set").mkdir()
    lines = [json.dumps({"messages": [USER, ANSWER], "extra": i}) for i in range(3)]
    (tmp_path / "set" / "train.jsonl").write_text("\n".join(lines))
    rows = list(read_rows(f"hf:{tmp_path}/set", max_rows=2))
    assert [conversation(r).messages for r in rows] == [[USER, ANSWER]] * 2
    assert rows[1].origin.endswith(":train:1")
