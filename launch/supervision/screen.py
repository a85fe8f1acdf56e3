"""What a person sees of a run: one line a stage with its time, a bar while it trains, a table at the end.

On a terminal the lines move; in a log file each is written once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LOG_EVERY_SECONDS = 15.0  # between two progress lines where there is no terminal


class Screen:
    """The launcher's output. `seconds` keeps what each stage took."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.seconds: dict[str, float] = {}

    def line(self, text: str) -> None:
        self.console.print(escape(text))

    @contextmanager
    def stage(self, name: str) -> Iterator[Note]:
        """Times a stage; what the caller notes about it is printed with the time when it ends well."""
        note, start = Note(), time.monotonic()
        if self.console.is_terminal:
            self.console.print(f"  {name} …", end="\r")  # written over by whatever comes next
        yield note
        self.seconds[name] = time.monotonic() - start
        self.line(f"  {name:<12} {self.seconds[name]:>7.1f} s   {note.text}")

    @contextmanager
    def training(self, total: int) -> Iterator[TrainingView]:
        view = TrainingView(self.console, total)
        try:
            yield view
        finally:
            view.close()


class Note:
    """What there is to say about a stage."""

    text = ""

    def __call__(self, text: str) -> None:
        self.text = text


class TrainingView:
    """The bar of the training: step, loss, expected acceptance length, tokens a second, share of time waiting."""

    def __init__(self, console: Console, total: int):
        self._console, self._total, self._last, self._shown = console, total, -1, time.monotonic()
        self._bar = None
        if console.is_terminal:
            columns = [TextColumn("  training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")]
            self._bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("waiting for the first step", total=total)

    def show(self, row: dict[str, Any]) -> None:
        """row: the newest line of metrics.jsonl."""
        if row["step"] == self._last:
            return
        self._last = row["step"]
        if self._bar is not None:
            self._bar.update(self._task, completed=row["step"] + 1, description=escape(describe_step(row)))
        elif time.monotonic() - self._shown > _LOG_EVERY_SECONDS:
            self._shown = time.monotonic()
            self._console.print(escape(f"    step {row['step'] + 1}/{self._total}  {describe_step(row)}"))

    def say(self, text: str) -> None:
        self._console.print(escape(f"    {text}"))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class MetricsTail:
    """The rows appended to a growing metrics.jsonl; from its top again when a trainer that starts again rewrites it."""

    def __init__(self, path: Path):
        self._path, self._offset, self._inode = path, 0, None

    def rows(self) -> list[dict[str, Any]]:
        """The complete rows since the last call."""
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return []
        if stat.st_ino != self._inode or stat.st_size < self._offset:
            self._offset, self._inode = 0, stat.st_ino
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        rows = []
        for line in whole.splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:  # rewritten under our hands: its rows come again from the top
                self._offset = 0
                return []
        return rows


def describe_step(row: dict[str, Any]) -> str:
    loss = "nothing trained" if row["loss"] is None else f"loss {row['loss']:.3f}"
    return (
        f"{loss}  acceptance ≈ {row['expected_length']:.2f}"
        f"  {row['tokens'] / row['seconds']:,.0f} tokens/s  waiting {row['wait_seconds'] / row['seconds']:.0%}"
    )
