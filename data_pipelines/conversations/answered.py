"""Rows as they are answered, in an append-only file: whatever kills this process, nothing finished is lost or doubled."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..errors import UserError

_SYNC_SECONDS = 5.0  # a killed process loses nothing, a machine that loses its power this much


class AnsweredRows:
    """index in the data → the line written for that row. Lines are on disk, only their places are in memory.

    One process at a time: raises UserError when another one is writing. What a kill left half-written at the end is cut
    off the file when it is opened.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._lock = path, FileLock(path.with_name(path.name + ".lock"), timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise UserError("another process is answering these very rows", where=str(path)) from None
        self._file = path.open("a+b")
        self._places: dict[int, int] = {}
        self._size, self._synced = 0, time.monotonic()
        self._scan()

    def __contains__(self, index: int) -> bool:
        return index in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, index: int, line: dict[str, Any]) -> None:
        entry = {"index": index, "line": line}
        # Half of a surrogate pair is no text; backslashreplace writes just the escape that JSON has for it.
        raw = (json.dumps(entry, ensure_ascii=False, default=str) + "\n").encode("utf-8", "backslashreplace")
        self._file.write(raw)
        self._file.flush()
        self._places[index] = self._size
        self._size += len(raw)
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def lines(self) -> Iterator[dict[str, Any]]:
        """In the order of the data."""
        with self._path.open("rb") as file:
            for index in sorted(self._places):
                file.seek(self._places[index])
                yield json.loads(file.readline())["line"]

    def remove(self) -> None:
        """All rows are where they belong: the file is no longer needed."""
        self._path.unlink()
        self.close()
        Path(self._lock.lock_file).unlink(missing_ok=True)

    def close(self) -> None:
        self._file.close()
        self._lock.release()

    def __enter__(self) -> AnsweredRows:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _scan(self) -> None:
        self._file.seek(0)
        for raw in self._file:
            try:
                index = json.loads(raw)["index"] if raw.endswith(b"\n") else None
            except ValueError:
                index = None
            if index is None:
                break
            self._places[index] = self._size
            self._size += len(raw)
        self._file.truncate(self._size)
