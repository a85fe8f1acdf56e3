from __future__ import annotations

import pytest

from data_pipelines.conversations.messages import read_conversation
from data_pipelines.conversations.quarantine import Unrenderable
from tests.data_pipelines.conversations.nasty_rows import HELLO, HI, WEATHER, answer, call, turn, user

CALLED = {"type": "function", "id": "call00001", "function": {"name": "weather", "arguments": {"city": "Paris"}}}


def cleaned(given: dict) -> tuple[dict, list[str]]:
    """The last turn, and what was repaired."""
    read = read_conversation([HI, given])
    return read.messages[-1], read.repairs


@pytest.mark.parametrize(
    ("given", "expected", "repairs"),
    [
        (HELLO, HELLO, []),
        (
            {"from": "gpt", "value": "Hello there."},
            HELLO,
            ["from/value read as role/content", "role gpt read as assistant"],
        ),
        (turn("model", "Hello there."), HELLO, ["role model read as assistant"]),
        (
            answer([{"type": "text", "text": "Hello "}, {"type": "output_text", "text": "there."}]),
            HELLO,
            ["text parts joined"],
        ),
        (answer("Hello there.", timestamp=7, reasoning=None, tool_calls=None), HELLO, []),
        (answer("a", thinking="b"), answer("a", reasoning="b"), []),
        (answer("a", reasoning_content="b", reasoning="c"), answer("a", reasoning="b"), []),
        (
            answer([{"type": "thinking", "thinking": "b"}, {"type": "text", "text": "a"}]),
            answer("a", reasoning="b"),
            ["text parts joined"],
        ),
        (answer(None, tool_calls=[CALLED]), answer("", tool_calls=[CALLED]), []),
        (
            answer(None, tool_calls=[call('{"city": "Paris"}')]),
            answer("", tool_calls=[CALLED]),
            ["a tool call's arguments read from JSON text"],
        ),
        (
            answer("", tool_calls=[{"id": "call00001", "name": "weather", "arguments": {"city": "Paris"}}]),
            answer("", tool_calls=[CALLED]),
            ["a bare tool call wrapped"],
        ),
        (
            answer(None, function_call={"name": "f", "arguments": ""}),
            answer("", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {}}}]),
            ["a bare tool call wrapped", "function_call read as tool_calls"],
        ),
        (answer("a", weight=0.0), answer("a", weight=0), []),
        (answer("a", token_ids=[1, 2]), answer("a", token_ids=[1, 2]), []),
        (answer("a", token_ids=None), answer("a"), []),
    ],
)
def test_turns_are_cleaned_and_repairs_named(given, expected, repairs):
    assert cleaned(given) == (expected, repairs)


def test_what_only_an_assistant_can_have_is_left_behind_elsewhere():
    odd = user("Hi", tool_calls=[call({})], reasoning="x", token_ids=[1], weight=1)
    assert read_conversation([odd, HELLO]).messages[0] == HI


@pytest.mark.parametrize(
    "tools", [[WEATHER], '[{"type": "function", "function": {"name": "weather"}}]', [{"name": "weather"}]]
)
def test_tools_come_in_three_ways(tools):
    read = read_conversation([HI, HELLO], tools)
    assert [tool["function"]["name"] for tool in read.tools] == ["weather"] and read.tools[0]["type"] == "function"
    assert bool(read.repairs) == (tools != [WEATHER])


@pytest.mark.parametrize("none", [None, [], "", "[]"])
def test_no_tools_come_in_four_ways(none):
    assert read_conversation([HI, HELLO], none).tools is None


@pytest.mark.parametrize(
    ("turns", "tools", "reason"),
    [
        ([HI, answer("a", tool_calls="[{")], None, "tool_calls: the text is not JSON"),
        ([HI, answer("a", tool_calls={"f": 1})], None, "tool_calls: not a list"),
        ([HI, answer("a", tool_calls=[call("[1]")])], None, "arguments: not an object"),
        ([HI, answer("a", tool_calls=[{"function": {"name": ""}}])], None, "no function with a name"),
        ([HI, HELLO], {"weather": 1}, "tools: not a list"),
        ([HI, HELLO], [{"type": "function"}], "a tool has no description"),
        ([HI, answer([{"type": "refusal", "refusal": "No."}])], None, r"not text \(refusal\)"),
        ([HI, answer(["Hello"])], None, r"not text \(str\)"),
        ([HI, answer("a", weight="no")], None, "weight"),
        ([HI, answer("a", token_ids=[True])], None, "not token ids"),
        ([HI, answer("a", token_ids=[-1])], None, "not token ids"),
        ([HI, answer("a", reasoning={"text": "b"})], None, "reasoning is not text"),
        ([HI, answer("a", reasoning="\ud83d")], None, "surrogate"),
        ([{"role": ["user"], "content": "Hi"}, HELLO], None, "unknown role"),
    ],
)
def test_what_cannot_be_cleaned_is_a_reason(turns, tools, reason):
    with pytest.raises(Unrenderable, match=reason):
        read_conversation(turns, tools)


def test_prompts_to_be_answered_need_a_question_and_no_answer():
    assert read_conversation([HI], answered=False).messages == [HI]
    assert read_conversation([HI, answer("")], answered=False).messages == [HI, answer("")]
    with pytest.raises(Unrenderable, match="no user turn"):
        read_conversation([turn("system", "Be kind.")], answered=False)
