"""Rows in, whatever they are kept in and however they are shaped; and what conversation a row holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..errors import UserError, check_choice
from .messages import Conversation, read_conversation
from .prompts import generate_prompts
from .quarantine import Unrenderable
from .readers import Files, Given, Row, Source, is_saved_dataset, limited, open_dataset, open_files, rows_of
from .shapes import shape_of, turns_of

__all__ = ["DEMO", "Row", "conversation", "open_source", "read_rows"]

# Prompts of `builtin:prompts` (seed 0) with SmolLM2's answers, in float32, made by
#   draftsmith regenerate demo data=prompts data.max_rows=1000 data.regenerate.max_new_tokens=96 --out demo.jsonl
DEMO = Path(__file__).with_name("demo.jsonl")


def open_source(path: str, max_rows: int = 0, seed: int = 0, streaming: bool = False) -> Source:
    """What `path` names: `builtin:prompts` and `builtin:eval` (generated from `seed`; max_rows is their number),
    `builtin:demo`, a file or a folder of files (see `readers`), or `hf:<id>[:config][:split]`.

    streaming: of `hf:`, rows are fetched as they are needed rather than all of them before the first.
    Raises UserError when there is no such thing.
    """
    if path in ("builtin:prompts", "builtin:eval"):
        if max_rows < 1:
            raise UserError(f"data.path={path} needs the number of prompts", fix="set data.max_rows=1000, say")
        split = "eval" if path == "builtin:eval" else "train"
        generated = [Row(r, f"{path}:{i}") for i, r in enumerate(generate_prompts(max_rows, seed, split), 1)]
        return Given(lambda: iter(generated), float(max_rows))
    if path == "builtin:demo":
        return Files([(DEMO, path)])
    if path.startswith("builtin:"):
        check_choice("data.path", path, ("builtin:prompts", "builtin:eval", "builtin:demo"))
    if path.startswith("hf:"):
        return open_dataset(path.removeprefix("hf:"), max_rows, streaming)
    if is_saved_dataset(Path(path).expanduser()):
        return open_dataset(str(Path(path).expanduser()), max_rows, streaming)
    return open_files(Path(path).expanduser(), path)


def read_rows(path: str, max_rows: int = 0, seed: int = 0, streaming: bool = False) -> Iterator[Row]:
    """The rows of `open_source`, one by one; the first max_rows of them unless that is 0.

    Raises UserError when there is no such thing. What cannot be read becomes a row with a `problem`.
    """
    source = open_source(path, max_rows, seed, streaming)
    return rows_of(limited(source.blocks(), max_rows))


def conversation(row: Row, *, answered: bool = True, shape: str = "auto", pair: str = "") -> Conversation:
    """The conversation of a row, found by its shape (see `shapes`) and cleaned by the rules of `read_conversation`.

    answered=False: for prompts to be answered; the last turn may be a user's and answers may be empty or missing.
    shape, pair: data.format and data.pair. Raises Unrenderable, with the reason, for a row that no rule repairs, and for
    one of text or tokens, in which there are no turns.
    """
    refuse_unreadable(row)
    repairs: list[str] = []
    shape = shape_of(row.data, shape, pair)
    if shape in ("text", "tokens"):
        raise Unrenderable(f"a row of {shape} has no turns")
    found = turns_of(row.data, shape, pair, repairs)
    truncated = found.get("finish_reason") == "length"
    return read_conversation(
        found.get("messages"), found.get("tools"), truncated=truncated, answered=answered, repairs=repairs
    )


def refuse_unreadable(row: Row) -> None:
    """Raises Unrenderable for what could not be read, or could not be answered by `regenerate`."""
    if row.problem:
        raise Unrenderable(row.problem)
    if "refused" in row.data:
        raise Unrenderable(str(row.data["refused"]))
