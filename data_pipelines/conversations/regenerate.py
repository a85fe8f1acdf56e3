"""The target answers prompts itself: answers that are the target's own are what a drafter has to predict.

Who answers is an `Answerer`: the target in this process (`greedy.py`), or an OpenAI-compatible server (`chat_server.py`).
Here is what both have in common: which turns are answered, what becomes of every row, and that a call that was killed
goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from ..errors import UserError
from .answered import AnsweredRows
from .messages import Conversation, Message
from .quarantine import Unrenderable, describe
from .rows import Row, conversation
from .shapes import SHAPE_KEYS


@dataclass
class Regenerated:
    """What was written: rows in all, how many were answered in this call and how many lay in the partial file already,
    how many answers the limit cut, and how many rows were refused, by reason. answered + resumed + refused = rows."""

    rows: int = 0
    answered: int = 0
    resumed: int = 0
    cut: int = 0
    refused: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Prompt:
    """A row to be answered. index: its place in the data. messages: its turns, with an empty assistant turn wherever the
    target has to answer, the last turn always being one. tools: their descriptions, if the row has any."""

    index: int
    row: Row
    messages: list[Message]
    tools: list[dict] | None = None

    @property
    def id(self) -> str:
        return row_id(self.row)

    def answered(self, messages: list[Message], finish_reason: str) -> dict[str, Any]:
        """The line that is written. finish_reason: "stop", "length" when the limit cut the last answer, "tool_calls"."""
        kept = {"domain": ""} | {k: v for k, v in self.row.data.items() if k not in SHAPE_KEYS}
        tools = {"tools": self.tools} if self.tools else {}
        return {"id": self.id, **kept, **tools, "messages": messages, "finish_reason": finish_reason}

    def refused(self, reason: str, detail: str = "") -> dict[str, Any]:
        """The line that is written in place of an answer. reason: the same for all rows of its kind."""
        return refused_line(self.row, reason) | ({"detail": detail} if detail else {})


Rows = Callable[[], Iterable[Row]]
Done = Callable[[int, dict[str, Any]], None]


class Answerer(Protocol):
    """Calls done(prompt.index, prompt.answered(…) or prompt.refused(…)) once for every prompt, in any order.

    identity: of everything that the answers depend on besides the prompts.
    """

    identity: str

    def answer(self, prompts: Iterator[Prompt], done: Done) -> None: ...


def regenerate(rows: Rows, answerer: Answerer, out: Path, *, shape: str = "auto", pair: str = "") -> Regenerated:
    """Have the rows answered; write `out`, one JSON line per row, in the rows' order.

    rows: gives the rows, the same each time. shape, pair: data.format and data.pair.

    Every assistant turn of a row is generated, in order, each after the target's own earlier answers; a row that ends
    with a user turn gets its answer. An answer that the limit cuts ends its row, because what follows in the row replied
    to another one; so does an answer that a tool's result follows. A written row is `Prompt.answered`. A row that cannot
    be prompted or answered becomes {"id", "refused": reason, "origin", "row"}, and is quarantined for that reason when
    the file is trained on.

    Resumable: the same call after a kill skips the rows that the partial file beside `out` holds. The partial file's
    name depends on the answerer and the rows, so that answers of another call are never mixed in.
    Raises UserError when no row at all can be answered.
    """
    key, total = answers_key(rows, answerer, shape, pair)
    with AnsweredRows(out.with_name(f".{out.name}.{key}.partial")) as known:
        answered = 0
        with tqdm(total=total, initial=len(known), desc="answers", unit="row", leave=False, disable=None) as bar:

            def done(index: int, line: dict[str, Any]) -> None:
                nonlocal answered
                answered += "refused" not in line
                known.add(index, line)
                bar.update()

            answerer.answer(_prompts(rows(), known, done, shape, pair), done)
        return _write(known, out, answered)


def answers_key(rows: Rows, answerer: Answerer, shape: str = "auto", pair: str = "") -> tuple[str, int]:
    """(a hash of all that the answers depend on, how many rows there are)."""
    digest, total = hashlib.sha256(json.dumps([answerer.identity, shape, pair]).encode()), 0
    for row in rows():
        digest.update((json.dumps([row.origin, row.data], sort_keys=True, default=str) + "\n").encode())
        total += 1
    return digest.hexdigest()[:32], total


def turns_before_answer(waiting: list[Message], history: list[Message]) -> bool:
    """Move the turns up to the next assistant's from `waiting` to `history`, and drop that one: it is to be written.

    False: nothing is left to be answered. A tool's result right after an answer replied to another one.
    """
    if not waiting or (waiting[0]["role"] == "tool" and history):
        return False
    while waiting[0]["role"] != "assistant":
        history.append(waiting.pop(0))
    waiting.pop(0)
    return True


def row_id(row: Row) -> str:
    return str(row.data["id"]) if isinstance(row.data, dict) and "id" in row.data else row.origin


def refused_line(row: Row, reason: str) -> dict[str, Any]:
    return {"id": row_id(row), "refused": reason, "origin": row.origin, "row": row.data}


def _prompts(rows: Iterable[Row], known: AnsweredRows, done: Done, shape: str, pair: str) -> Iterator[Prompt]:
    """Those that are still to be answered; rows that cannot be prompted are done at once."""
    for index, row in enumerate(rows):
        if index in known:
            continue
        try:
            yield _prompt(index, row, conversation(row, answered=False, shape=shape, pair=pair))
        except Unrenderable as error:
            done(index, refused_line(row, str(error)))


def _prompt(index: int, row: Row, talk: Conversation) -> Prompt:
    messages: list[Message] = []
    for message in talk.messages:
        if message["role"] == "assistant":
            if messages[-1]["role"] == "assistant":
                continue  # two answers in a row: the target gives one
            message = {"role": "assistant", "content": ""}
        messages.append(message)
    if messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return Prompt(index, row, messages, talk.tools)


def _write(rows: AnsweredRows, out: Path, answered: int) -> Regenerated:
    """All rows to `out`, by a rename; then the partial file is gone. answered: rows of this call."""
    result, refused, examples = Regenerated(rows=len(rows), answered=answered), Counter(), {}
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for line in rows.lines():
            file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
            if "refused" in line:
                refused[line["refused"]] += 1
                examples.setdefault(line["refused"], line["origin"])
            result.cut += line.get("finish_reason") == "length"
        file.flush()
        os.fsync(file.fileno())
    result.refused, whole = dict(refused), result.rows - refused.total()
    result.resumed = whole - answered
    if whole:
        temporary.replace(out)
    else:
        temporary.unlink()
    rows.remove()
    if not whole:
        reasons = describe(refused, examples) or "there are no rows"
        raise UserError(f"no prompt can be answered: {reasons}", fix="rows need `messages` with a user turn")
    return result
