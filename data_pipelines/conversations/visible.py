"""Does the template show what the row holds? What it leaves out would be trained on unseen, or not at all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from .messages import Message
from .quarantine import Unrenderable
from .templates import ChatTemplate


def check_special_text(template: ChatTemplate, messages: Sequence[Message], tools: list[dict] | None) -> None:
    """Raises Unrenderable if a text of the row writes out a special token: within a rendered conversation a tokenizer
    takes it for the token, and the turn for the end of one or the beginning of another. (Where the target's own tokens
    are given, the text says what they are.)"""
    for text in _texts([[m for m in messages if "token_ids" not in m], tools]):
        if token := template.special_in(text):
            raise Unrenderable(f"a turn writes out the special token {token}")


def check_turns(messages: Sequence[Message], tools: list[dict] | None, rendered: str) -> None:
    """Raises Unrenderable if the rendering leaves out a tool, or a turn that is not an assistant's. (Of an assistant's
    earlier turns templates may strip the reasoning: that is what decoding sees.)"""
    rendered = _squeezed(rendered)
    for message in messages:
        if message["role"] != "assistant" and not _shows(rendered, message["content"]):
            raise Unrenderable(f"the template leaves out a turn of role {message['role']}")
    for tool in tools or ():
        if not _shows(rendered, str(tool["function"].get("name", ""))):
            raise Unrenderable("the template leaves out the tools")


def check_answer(message: Message, prompt: str, rendered: str) -> None:
    """Raises Unrenderable if the rendering of a turn that is trained on, which follows its prompt, leaves out a part of
    it. (A prompt that opens a think block has the first word of an answer that writes the block out.)"""
    rendered, header, content = _squeezed(rendered), _squeezed(prompt[-64:]), _squeezed(message["content"])
    if not any(header.endswith(content[:n]) and _shows(rendered, content[n:]) for n in range(17)):
        raise Unrenderable("the template leaves out a part of the answer")
    if not _shows(rendered, message.get("reasoning", "")):
        raise Unrenderable("the template leaves out the reasoning")
    functions = [call["function"] for call in message.get("tool_calls", ())]
    names = Counter(function["name"] for function in functions)
    shown = all(rendered.count(_squeezed(name)) >= times for name, times in names.items())
    if not shown or not all(_shows(rendered, text) for f in functions for text in _texts(f["arguments"])):
        raise Unrenderable("the template leaves out tool calls")


def _shows(rendered: str, text: str) -> bool:
    """Whether the text is there, as it is or as a JSON string; white space is the template's to change."""
    plain = _squeezed(text)
    return plain in rendered or _squeezed(json.dumps(text, ensure_ascii=False)[1:-1]) in rendered


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _texts(value: Any) -> Iterator[str]:
    """Every string in nested lists and objects, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
