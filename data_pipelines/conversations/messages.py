"""Turns as people write them → turns as a chat template takes them, by documented rules; or a reason why not.

A turn becomes {"role", "content"} and, where it has them, "reasoning", "tool_calls", "tool_call_id", "name", "weight"
and "token_ids". Everything else that it holds stays behind, so that no other key reaches the template.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from .quarantine import Unrenderable

Message = dict[str, Any]

ROLES = {role: role for role in ("user", "assistant", "system", "developer", "tool")}
ROLES |= {"human": "user", "gpt": "assistant", "model": "assistant", "function": "tool", "observation": "tool"}
REASONING = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True)
class Conversation:
    """messages: cleaned turns; to be trained on, they end with an assistant's. tools: their descriptions, if any.
    truncated: the last answer was cut by a limit. repairs: the rules that changed something."""

    messages: list[Message]
    truncated: bool = False
    repairs: list[str] = field(default_factory=list)
    tools: list[dict] | None = None


def read_conversation(
    turns: Any, tools: Any = None, *, truncated: bool = False, answered: bool = True, repairs: list[str] | None = None
) -> Conversation:
    """The turns, cleaned by these rules; each that changes something is named in the conversation's `repairs`.

    * Roles and fields under other names are taken by their usual meaning (`ROLES`, `from`/`value`, `function_call`).
    * Content in parts is joined if all parts are text; parts of reasoning become the turn's reasoning.
    * Tool calls become {"type": "function", "id", "function": {"name", "arguments": an object}}, whether the arguments
      came as an object or as JSON text; descriptions of tools may come as JSON text or without their wrapper.
    * Turns after the last assistant turn are left out, because nothing in them can be trained on.

    answered=False: for prompts to be answered; the last turn may be a user's and answers may be empty or missing.
    repairs: rules that were applied before. Raises Unrenderable, with the reason, for what no rule repairs.
    """
    repairs = list(repairs or [])
    if not isinstance(turns, list):
        raise Unrenderable("messages is not a list")
    described = _tools(tools, repairs)
    messages = [_message(turn, repairs) for turn in turns]
    roles = [m["role"] for m in messages]
    if not messages:
        raise Unrenderable("the conversation is empty")
    if next((r for r in roles if r not in ("system", "developer")), None) == "assistant":
        raise Unrenderable("the conversation starts with an assistant turn")
    if answered:
        if "assistant" not in roles:
            raise Unrenderable("there is no assistant turn")
        last = len(roles) - 1 - roles[::-1].index("assistant")
        if last + 1 < len(messages):
            repairs.append("turns after the last answer left out")
            messages = messages[: last + 1]
        if any(m["role"] == "assistant" and not (m["content"].strip() or "tool_calls" in m) for m in messages):
            raise Unrenderable("an answer is empty")
    elif "user" not in roles:
        raise Unrenderable("there is no user turn")
    return Conversation(messages, truncated, sorted(set(repairs)), described)


def _message(turn: Any, repairs: list[str]) -> Message:
    if not isinstance(turn, dict):
        raise Unrenderable("a turn is not an object with role and content")
    if "role" not in turn and "from" in turn:
        turn = {**turn, "role": turn["from"], "content": turn.get("value")}
        repairs.append("from/value read as role/content")
    role = turn.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise Unrenderable(f"unknown role {role!r}")
    if ROLES[role] != role:
        repairs.append(f"role {role} read as {ROLES[role]}")
    message: Message = {"role": ROLES[role]}
    parts = turn.get("content")
    if isinstance(parts, list):
        message |= _join(parts)
        repairs.append("text parts joined")
    else:
        message["content"] = parts
    if message["role"] == "assistant":
        message |= _written_by_assistant(turn, repairs)
    if message["content"] is None and "tool_calls" in message:
        message["content"] = ""
    if not isinstance(message["content"], str):
        raise Unrenderable("a turn has no text")
    for key in ("name", "tool_call_id"):
        if isinstance(turn.get(key), str) and turn[key]:
            message[key] = turn[key]
    try:
        json.dumps(message, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Unrenderable("a turn has half of a surrogate pair, which is no text") from None
    return message


def _written_by_assistant(turn: dict, repairs: list[str]) -> Message:
    """What only an assistant's turn can have: reasoning, tool calls, a weight, the tokens themselves."""
    found: Message = {}
    given = next((turn[key] for key in REASONING if turn.get(key)), None)
    if given is not None:
        if not isinstance(given, str):
            raise Unrenderable("a turn's reasoning is not text")
        found["reasoning"] = given
    calls = turn.get("tool_calls")
    if not calls and turn.get("function_call"):
        calls = [turn["function_call"]]
        repairs.append("function_call read as tool_calls")
    if calls:
        found["tool_calls"] = [_call(call, repairs) for call in _parsed(calls, list, "tool_calls", repairs)]
    if turn.get("weight") is not None:
        if turn["weight"] not in (0, 1):
            raise Unrenderable("a turn's weight is neither 0 nor 1")
        found["weight"] = int(turn["weight"])
    ids = turn.get("token_ids")
    if ids:
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            raise Unrenderable("a turn's token_ids are not token ids")
        found["token_ids"] = ids
    return found


def _join(parts: list) -> Message:
    """{"content", perhaps "reasoning"} of content in parts."""
    text: list[str] = []
    reasoning: list[str] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            text.append(part["text"])
        elif kind in REASONING and isinstance(part.get(kind), str):
            reasoning.append(part[kind])
        else:
            raise Unrenderable(f"a turn has content that is not text ({kind or type(part).__name__})")
    joined: Message = {"content": "".join(text)}
    return joined | ({"reasoning": "".join(reasoning)} if reasoning else {})


def _call(call: Any, repairs: list[str]) -> dict:
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(call, dict) and function is None and "name" in call:
        function = call
        repairs.append("a bare tool call wrapped")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise Unrenderable("a tool call has no function with a name")
    arguments = _parsed(function.get("arguments") or {}, dict, "a tool call's arguments", repairs)
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) and call["id"] else {}
    return {"type": "function", **identity, "function": {"name": function["name"], "arguments": arguments}}


def _tools(tools: Any, repairs: list[str]) -> list[dict] | None:
    if not tools:
        return None
    described = []
    for tool in _parsed(tools, list, "tools", repairs):
        if isinstance(tool, dict) and "function" not in tool and isinstance(tool.get("name"), str):
            tool = {"type": "function", "function": tool}
            repairs.append("a bare tool description wrapped")
        if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
            raise Unrenderable("a tool has no description")
        described.append(tool)
    return described or None


def _parsed(value: Any, kind: type, what: str, repairs: list[str]) -> Any:
    """The value, which is of that kind or JSON text of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise Unrenderable(f"{what}: the text is not JSON") from None
        repairs.append(f"{what} read from JSON text")
    if not isinstance(value, kind):
        raise Unrenderable(f"{what}: not {'an object' if kind is dict else 'a list'}")
    return value
