"""Each shape of row gives the conversation, text or tokens that lie in it; what is ambiguous is refused by name."""

from __future__ import annotations

import json

import pytest

from data_pipelines.conversations.config import DataConfig
from data_pipelines.conversations.quarantine import Unrenderable
from data_pipelines.conversations.row_documents import row_documents
from data_pipelines.conversations.rows import Row, conversation
from data_pipelines.conversations.shapes import PAIRS, shape_of
from data_pipelines.errors import UserError

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
CHAT = [USER, ANSWER]


def talk(data: dict, **options):
    return conversation(Row(data, "test:1"), **options)


@pytest.fixture(scope="module")
def tokenizer(tiny_target):
    return tiny_target.load_tokenizer()


def documents(data: dict, tokenizer, **options):
    return row_documents(Row(data, "test:1"), tokenizer, DataConfig(path="rows.jsonl", **options))


@pytest.mark.parametrize(("prompt", "answer"), PAIRS)
def test_every_pair_of_keys_is_a_conversation(prompt, answer):
    assert talk({prompt: "Hi", answer: "Hello", "score": 3}).messages == CHAT
    assert shape_of({prompt: "Hi", answer: "Hello"}) == "pairs"


def test_what_an_instruction_is_about_goes_below_it():
    for key in ("input", "context"):
        assert talk({"instruction": "Add", key: "1, 2", "output": "3"}).messages[0]["content"] == "Add\n\n1, 2"
    assert talk({"instruction": "Hi", "input": "", "output": "Hello", "text": "### Hi ### Hello"}).messages == CHAT


def test_prompts_and_answers_may_be_turns_and_have_a_system_turn():
    assert talk({"prompt": [USER], "completion": [ANSWER]}).messages == CHAT
    preferred = talk({"prompt": "Hi", "chosen": CHAT, "rejected": [USER, {"role": "assistant", "content": "No"}]})
    assert preferred.messages == CHAT and preferred.repairs == ["prompt repeated in the answer left out"]
    spoken = talk({"system": "Be kind", "question": "Hi", "response": "Hello"})
    assert spoken.messages == [{"role": "system", "content": "Be kind"}, *CHAT]


def test_rows_of_messages_may_repeat_their_prompt():
    assert talk({"prompt": "Hi", "prompt_id": "7", "messages": CHAT}).messages == CHAT


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"messages": CHAT, "conversations": CHAT}, "messages and sharegpt"),
        ({"messages": CHAT, "input_ids": [1]}, "tokens and messages"),
        (
            {"prompt": "Hi", "completion": "Hello", "question": "Hi", "answer": "No"},
            "prompt/completion and .*question/answer",
        ),
        ({"request": {"messages": [USER]}}, "a request without its response"),
        ({"title": "Hi", "body": "Hello"}, "its keys: body, title"),
    ],
)
def test_what_is_ambiguous_or_unknown_is_refused_with_its_keys(data, named):
    with pytest.raises(Unrenderable, match=named):
        talk(data)


def test_the_config_can_say_which_shape_and_which_keys():
    both = {"messages": CHAT, "title": "Who?", "body": "Me"}
    assert talk(both, pair="title/body").messages[1]["content"] == "Me"
    assert talk({"messages": CHAT, "conversations": CHAT[:1]}, shape="messages").messages == CHAT
    with pytest.raises(Unrenderable, match="no title"):
        talk({"messages": CHAT}, pair="title/body")
    for wrong in ({"format": "alpaca"}, {"pair": "title"}, {"pair": "a/b", "format": "text"}):
        with pytest.raises(UserError):
            DataConfig(path="rows.jsonl", **wrong)


def test_plain_text_is_trained_on_throughout(tokenizer):
    made = documents({"text": "First open the box"}, tokenizer)
    ((ids, mask),) = made.documents
    assert tokenizer.decode(ids) == "First open the box" and all(mask) and made.shape == "text"
    for text in (" \n", None, 5):
        with pytest.raises(Unrenderable):
            documents({"text": text}, tokenizer)


def test_tokenised_rows_are_taken_as_they_are(tokenizer):
    ids = [5, 6, 7, 8]
    for data in (
        {"loss_mask": [0, 0, 1, 1]},
        {"labels": [-100, -100, 7, 8]},
        {"loss_mask": [False, False, True, True]},
    ):
        assert documents({"input_ids": ids, **data}, tokenizer).documents == [(ids, [False, False, True, True])]
    bare = documents({"input_ids": ids, "attention_mask": [1] * 4}, tokenizer)
    assert bare.documents == [(ids, [True] * 4)]
    assert bare.repairs == ["input_ids without loss_mask trained on throughout"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"input_ids": []}, "not a list of whole numbers"),
        ({"input_ids": [1, 2.5]}, "not a list of whole numbers"),
        ({"input_ids": "1 2"}, "not a list of whole numbers"),
        ({"input_ids": [1, 10**6]}, "outside the tokenizer's vocabulary"),
        ({"input_ids": [1, -2]}, "outside the tokenizer's vocabulary"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "differ in length"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "not a list of 0 and 1"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "labels are not the input_ids"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "no token is trained on"),
        ({"input_ids": [1, 2], "loss_mask": [1, 0]}, "no token is trained on"),
    ],
)
def test_tokenised_rows_that_do_not_fit_are_refused(data, reason, tokenizer):
    with pytest.raises(Unrenderable, match=reason):
        documents(data, tokenizer)


# --- traffic ---------------------------------------------------------------------------------------------------------

REQUEST = {"model": "m", "messages": [USER], "temperature": 0.7}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}


def chunk(finish=None, **delta) -> dict:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


STREAM = [
    chunk(role="assistant", content=""),
    chunk(reasoning_content="Greet"),
    chunk(reasoning_content=" back"),
    chunk(content="Hel"),
    chunk(content="lo"),
    chunk(finish="stop"),
    {"object": "chat.completion.chunk", "choices": [], "usage": {"total_tokens": 9}},
]


def answered(message: dict, finish: str = "stop") -> dict:
    return {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": finish}]}


def test_a_request_and_its_response_are_a_conversation():
    assert talk({"request": REQUEST, "response": answered(ANSWER)}).messages == CHAT
    wrapped = {"request": {"body": json.dumps(REQUEST)}, "response": {"status_code": 200, "body": answered(ANSWER)}}
    assert talk(wrapped).messages == CHAT
    assert talk({"request": REQUEST, "response": answered(ANSWER, "length")}).truncated


def test_streamed_chunks_are_joined():
    wire = "".join(f"data: {json.dumps(c)}\n\n" for c in STREAM) + "data: [DONE]\n\n"
    expected = {**ANSWER, "reasoning": "Greet back"}
    for response in (STREAM, wire, {"status_code": 200, "body": wire}):
        assert talk({"request": REQUEST, "response": response}).messages == [USER, expected]
    cut = talk({"request": REQUEST, "response": [*STREAM[:-2], chunk(finish="length")]})
    assert cut.truncated and cut.messages[-1]["content"] == "Hello"


def test_tool_calls_are_kept_whole_or_streamed():
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    request = {**REQUEST, "tools": tools}
    whole = talk(
        {"request": request, "response": answered({"role": "assistant", "content": None, "tool_calls": [CALL]})}
    )
    parts = [
        chunk(
            tool_calls=[{"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": ""}}]
        ),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": '{"city": '}}]),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": '"Paris"}'}}]),
        chunk(finish="tool_calls"),
    ]
    streamed = talk({"request": request, "response": parts})
    assert whole.messages == streamed.messages and whole.tools == streamed.tools == tools
    assert whole.messages[-1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Paris"}}


@pytest.mark.parametrize(
    ("request_", "response", "reason"),
    [
        (REQUEST, {"status_code": 500, "body": "oops"}, "status 500"),
        (REQUEST, {"error": {"message": "too long"}}, "an error"),
        (REQUEST, STREAM[:-2], "breaks off"),
        (REQUEST, "data: {broken", "not JSON"),
        (REQUEST, '{"broken"', "not JSON"),
        (REQUEST, answered({"role": "assistant", "content": ""}), "empty"),
        (REQUEST, {"choices": []}, "no choices"),
        (REQUEST, None, "no choices"),
        ({"prompt": "Hi"}, answered(ANSWER), "not a chat completion"),
        ("GET /v1/models", answered(ANSWER), "not a chat completion"),
    ],
)
def test_failed_exchanges_are_refused(request_, response, reason):
    with pytest.raises(Unrenderable, match=reason):
        talk({"request": request_, "response": response})


def test_the_token_ids_of_a_server_are_kept(tokenizer):
    ids = tokenizer.encode("Here are")
    response = answered({"role": "assistant", "content": "Here are"})
    response["choices"][0]["token_ids"] = [*ids, tokenizer.eos_token_id]
    ((got, mask),) = documents({"request": REQUEST, "response": response}, tokenizer).documents
    assert [i for i, m in zip(got, mask) if m] == [*ids, tokenizer.eos_token_id]
