"""Captured traffic of an OpenAI-compatible server: one row holds a request and the response to it.

A request is a chat completion's body, alone or under `body`. A response is the answer's body, alone or under `body`, or
the chunks of a streamed answer: as a list, or as the text that went over the wire (`data: {…}` lines).
"""

from __future__ import annotations

import json
from typing import Any

from .quarantine import Unrenderable


def is_traffic(data: dict) -> bool:
    return "request" in data and "response" in data


def exchange(data: dict) -> dict[str, Any]:
    """The row as a conversation: {"messages", "tools"?, "finish_reason"?}, with the answer as its last message.

    Raises Unrenderable for an answer that failed, and for a request that is no chat.
    """
    request, response = _body(data["request"]), data["response"]
    status = response.get("status_code", response.get("status")) if isinstance(response, dict) else None
    if isinstance(status, int) and status >= 400:
        raise Unrenderable(f"the server answered with status {status}")
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
        raise Unrenderable("the request is not a chat completion")
    body = _body(response)
    chunks = body if isinstance(body, list) else _events(body) if isinstance(body, str) else None
    choice = _choice(body) if chunks is None else _joined(chunks)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise Unrenderable("the response has no answer")
    if choice.get("token_ids"):  # what the target wrote, token by token, where the server was asked for it
        message = {**message, "token_ids": choice["token_ids"]}
    row = {"messages": [*request["messages"], {"role": "assistant", **message}]}
    if request.get("tools"):
        row["tools"] = request["tools"]
    if choice.get("finish_reason"):
        row["finish_reason"] = choice["finish_reason"]
    return row


def _body(side: Any) -> Any:
    """What was sent: the object itself or what lies under `body`; JSON that was logged as text is read."""
    if isinstance(side, dict) and "body" in side:
        side = side["body"]
    if isinstance(side, str) and side.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(side)
        except ValueError as error:
            raise Unrenderable("the body of the request or response is not JSON") from error
    return side


def _choice(body: Any) -> dict:
    if isinstance(body, dict) and body.get("error"):
        raise Unrenderable("the response is an error")
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Unrenderable("the response has no choices")
    return choices[0]


def _events(text: str) -> list[Any]:
    """The chunks of a text of server-sent events; the last one, `[DONE]`, is none."""
    sent = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]
    try:
        return [json.loads(event) for event in sent if event and event != "[DONE]"]
    except ValueError as error:
        raise Unrenderable("a chunk of the response is not JSON") from error


def _joined(chunks: list[Any]) -> dict:
    """The answer that the deltas of a stream spell, as an unstreamed response would hold it.

    Raises Unrenderable when the stream did not come to its end: what is missing cannot be known.
    """
    message: dict[str, Any] = {"role": "assistant"}
    calls: dict[int, dict] = {}
    finish = None
    for chunk in chunks:
        if not isinstance(chunk, dict) or chunk.get("error"):
            raise Unrenderable("the response is an error")
        for choice in chunk.get("choices") or []:
            if choice.get("index", 0) != 0:
                continue  # of several answers the first is taken, as in an unstreamed response
            delta = choice.get("delta") or {}
            for key in ("content", "reasoning_content", "reasoning"):
                if isinstance(delta.get(key), str):
                    message[key] = message.get(key, "") + delta[key]
            for part in delta.get("tool_calls") or []:
                call = calls.setdefault(part.get("index", len(calls)), {"type": "function", "function": {}})
                function, said = call["function"], part.get("function") or {}
                call.update({key: part[key] for key in ("id",) if part.get(key)})
                if said.get("name"):
                    function["name"] = said["name"]
                function["arguments"] = function.get("arguments", "") + (said.get("arguments") or "")
            finish = choice.get("finish_reason") or finish
    if finish is None:
        raise Unrenderable("the streamed response breaks off")
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return {"message": message, "finish_reason": finish}
