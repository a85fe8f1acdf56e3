"""Rows that cannot be trained on, each kept with its reason."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any


class Unrenderable(Exception):
    """A row that cannot be trained on; the text is the reason, the same for all rows of its kind."""


class Quarantine:
    """Collects refused rows: one JSON line {"origin", "reason", "row"} each, written to `path` as they come."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, str] = {}  # reason → origin of the first row that was refused for it
        # Half of a surrogate pair is no text, and backslashreplace writes just the escape that JSON has for it.
        self._file = path.open("w", encoding="utf-8", errors="backslashreplace")

    def add(self, origin: str, reason: str, row: Any) -> None:
        """origin: "file:line" or the like. row: the row as it was read (the text of the line if it is no JSON)."""
        self.counts[reason] += 1
        self.examples.setdefault(reason, origin)
        line = {"origin": origin, "reason": reason, "row": row}
        self._file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Quarantine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def describe(counts: dict[str, int], examples: dict[str, str], most: int = 5) -> str:
    """The most frequent reasons with their counts and one example each, for people."""
    common = Counter(counts).most_common(most)
    return "; ".join(f"{count} × {reason} (first: {examples[reason]})" for reason, count in common)
