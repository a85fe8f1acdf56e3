"""Rows in: generated prompts, the demo's file, JSONL files, `datasets` names. And what conversation a row holds.

A row is a dict with `messages`: a list of {"role", "content"}. Other columns travel along and never reach the template.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import UserError
from .prompts import generate_prompts
from .rendering import Message, Unrenderable

# Prompts of `builtin:prompts` (seed 0) with SmolLM2's answers, in float32, made by
#   draftsmith regenerate demo data=prompts data.max_rows=1000 data.regenerate.max_new_tokens=96 --out demo.jsonl
DEMO = Path(__file__).with_name("demo.jsonl")
ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "system": "system"}


@dataclass(frozen=True)
class Row:
    """data: the row; where the line is no JSON object, its text, with `problem` saying so. origin: "file:line"."""

    data: Any
    origin: str
    problem: str = ""


@dataclass(frozen=True)
class Conversation:
    """messages: cleaned turns that end with an assistant's. truncated: the last answer was cut by a limit.
    repairs: the rules that were applied to the row."""

    messages: list[Message]
    truncated: bool = False
    repairs: list[str] = field(default_factory=list)


def read_rows(path: str, max_rows: int = 0, seed: int = 0) -> Iterator[Row]:
    """The rows that `path` names; the first max_rows of them unless that is 0.

    path: `builtin:prompts` and `builtin:eval` (generated from `seed`; max_rows is their number), `builtin:demo`, a
    `.jsonl` file, or `hf:<id>[:split]` (split: train).
    Raises UserError when there is no such thing. A line that is not a JSON object becomes a row with a `problem`.
    """
    if path in ("builtin:prompts", "builtin:eval"):
        if max_rows < 1:
            raise UserError(f"data.path={path} needs the number of prompts", fix="set data.max_rows=1000, say")
        split = "eval" if path == "builtin:eval" else "train"
        rows = (Row(r, f"{path}:{i}") for i, r in enumerate(generate_prompts(max_rows, seed, split), 1))
    elif path == "builtin:demo":
        rows = _read_jsonl(DEMO, path)
    elif path.startswith("builtin:"):
        raise UserError(f"data.path={path} is not one of builtin:prompts, builtin:eval, builtin:demo")
    elif path.startswith("hf:"):
        rows = _read_dataset(path.removeprefix("hf:"))
    else:
        rows = _read_jsonl(Path(path).expanduser(), path)
    return islice(rows, max_rows) if max_rows else rows


def conversation(row: Row, *, answered: bool = True) -> Conversation:
    """The conversation of a row, cleaned by these rules; each that changes something is named in `repairs`.

    * ShareGPT rows (`conversations` of from/value) and the roles `human` and `gpt` are taken by their usual meaning.
    * Content in parts is joined if all parts are text.
    * Turns after the last assistant turn are left out, because nothing in them can be trained on.

    answered=False: for prompts to be answered; the last turn may be a user's and answers may be empty or missing.
    Raises Unrenderable, with the reason, for a row that no rule repairs.
    """
    if row.problem:
        raise Unrenderable(row.problem)
    if "refused" in row.data:  # a prompt that could not be answered, passed on by `regenerate`
        raise Unrenderable(str(row.data["refused"]))
    repairs: list[str] = []
    messages = [_message(turn, repairs) for turn in _turns(row.data, repairs)]
    if not messages:
        raise Unrenderable("the conversation is empty")
    roles = [m["role"] for m in messages]
    spoken = [r for r in roles if r != "system"]
    if spoken[:1] == ["assistant"]:
        raise Unrenderable("the conversation starts with an assistant turn")
    if answered:
        if "assistant" not in roles:
            raise Unrenderable("there is no assistant turn")
        last = len(roles) - 1 - roles[::-1].index("assistant")
        if last + 1 < len(messages):
            repairs.append("turns after the last answer left out")
            messages = messages[: last + 1]
        if any(m["role"] == "assistant" and not m["content"].strip() for m in messages):
            raise Unrenderable("an answer is empty")
    elif "user" not in roles:
        raise Unrenderable("there is no user turn")
    return Conversation(messages, row.data.get("finish_reason") == "length", sorted(set(repairs)))


def _turns(data: dict, repairs: list[str]) -> list:
    turns = data.get("messages")
    if turns is None and "conversations" in data:
        turns = data["conversations"]
        repairs.append("conversations read as messages")
    if turns is None:
        raise Unrenderable("the row has no messages")
    if not isinstance(turns, list):
        raise Unrenderable("messages is not a list")
    return turns


def _message(turn: Any, repairs: list[str]) -> Message:
    if not isinstance(turn, dict):
        raise Unrenderable("a turn is not an object with role and content")
    if "role" not in turn and "from" in turn:
        turn = {"role": turn["from"], "content": turn.get("value")}
        repairs.append("from/value read as role/content")
    role, content = turn.get("role"), turn.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise Unrenderable(f"unknown role {role!r}")
    if ROLES[role] != role:
        repairs.append(f"role {role} read as {ROLES[role]}")
    if turn.get("tool_calls"):
        raise Unrenderable("a turn calls tools")
    if isinstance(content, list):
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            raise Unrenderable("a turn has content that is not text")
        content = "".join(p["text"] for p in content)
        repairs.append("text parts joined")
    if not isinstance(content, str):
        raise Unrenderable("a turn has no text")
    return {"role": ROLES[role], "content": content}


def _read_jsonl(path: Path, name: str) -> Iterator[Row]:
    if not path.is_file():
        raise UserError(
            f"data file {name} does not exist", fix="data.path is a .jsonl file, hf:<id> or builtin:prompts"
        )
    return _lines(path, name)


def _lines(path: Path, name: str) -> Iterator[Row]:
    """Blank lines hold no row and are passed over."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            origin, text = f"{name}:{number}", raw.decode("utf-8-sig", errors="replace").strip()
            if not text:
                continue
            try:
                raw.decode("utf-8-sig")
                data = json.loads(text)
            except UnicodeDecodeError:
                yield Row(text, origin, "the line is not UTF-8")
            except json.JSONDecodeError:
                yield Row(text, origin, "the line is not JSON")
            else:
                problem = "" if isinstance(data, dict) else "the line is not a JSON object"
                yield Row(data, origin, problem)


def _read_dataset(name: str) -> Iterator[Row]:
    import datasets  # seconds to import, and only needed here

    path, _, split = name.rpartition(":")
    if not path or "/" in split:
        path, split = name, "train"
    try:
        dataset = datasets.load_dataset(path, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"the dataset {path} (split {split}) cannot be loaded: {reason}",
            where=f"data.path=hf:{name}",
            fix="check the name, the split and the network",
        ) from error
    return (Row(dict(data), f"{path}:{split}:{i}") for i, data in enumerate(dataset))
