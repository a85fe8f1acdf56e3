from __future__ import annotations

import pytest

from data_pipelines.conversations.quarantine import Unrenderable
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
        ({"messages": None}, "not a list"),
        ({"messages": "Hi"}, "not a list"),
        ({"messages": []}, "empty"),
        ({"messages": ["Hi"]}, "not an object"),
        ({"messages": [ANSWER, USER, ANSWER]}, "starts with an assistant"),
        ({"messages": [SYSTEM, ANSWER]}, "starts with an assistant"),
        ({"messages": [USER]}, "no assistant turn"),
        ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, "an answer is empty"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "has no text"),
        ({"messages": [USER, {"role": "narrator", "content": "1"}, ANSWER]}, "unknown role 'narrator'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}, "not text"),
        ({"text": "All of it"}, "a row of text has no turns"),
        ({"input_ids": [1, 2]}, "a row of tokens has no turns"),
    ],
)
def test_each_unusable_row_has_its_reason(data, reason):
    with pytest.raises(Unrenderable, match=reason):
        conversation(row(data))


def test_what_could_not_be_read_keeps_its_problem():
    with pytest.raises(Unrenderable, match="the line is not JSON"):
        conversation(Row("{", "test:1", "the line is not JSON"))
    with pytest.raises(Unrenderable, match="the server said no"):
        conversation(row({"refused": "the server said no", "messages": [USER, ANSWER]}))


def test_repairs_are_named():
    shared = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    repaired = conversation(row(shared))
    assert repaired.messages == [USER, ANSWER]
    assert repaired.repairs == [
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
    whole = conversation(row({"messages": messages, "finish_reason": "length"}))
    assert (whole.messages, whole.truncated, whole.repairs) == (messages, True, [])
    assert conversation(row({"messages": [USER]}), answered=False).messages == [USER]


def test_prompts_that_wait_for_an_answer_come_in_several_shapes():
    for data in ({"prompt": "Hi"}, {"question": "Hi"}, {"instruction": "Hi"}, {"prompt": [USER]}):
        assert conversation(row(data), answered=False).messages == [USER]
        with pytest.raises(Unrenderable, match="no assistant turn"):
            conversation(row(data))


def test_what_does_not_exist_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.txt").write_text("{}")
    for path in (
        "nowhere.jsonl",
        "builtin:what",
        "builtin:prompts",
        f"hf:{tmp_path}/nothing",
        "hf:a:b:c:d",
        str(tmp_path / "empty"),
        str(tmp_path / "rows.txt"),
    ):
        with pytest.raises(UserError) as error:
            read_rows(path)
        assert error.value.fix or "is not one of" in error.value.what


def test_generated_prompts_are_rows():
    rows = list(read_rows("builtin:prompts", 3))
    assert [r.origin for r in rows] == [f"builtin:prompts:{n}" for n in (1, 2, 3)]
