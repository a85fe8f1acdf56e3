"""Packs that no attempt could produce and that a run does without (source.on_poison=quarantine).

They stand in `<run_dir>/quarantined_packs.jsonl`, one line each: pack, index, documents, reasons. The file is part of what
the run is a function of: resumed, it does without the same packs, at once.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..packing import Pack
from ..run_folder import RunFolder
from . import StreamError


def read_quarantine(run_dir: Path) -> list[dict[str, Any]]:
    path = RunFolder(run_dir).quarantined_packs
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Quarantine:
    """Shared by the ranks of a run through its file. most: uses of packs that a run may do without."""

    def __init__(self, run_dir: Path, most: int):
        self._run_dir, self._most = Path(run_dir), most
        listed = read_quarantine(run_dir)
        self._held = {(line["index"], line["pack"]) for line in listed}
        self._refuse_too_many(listed)

    def holds(self, index: int, identity: str) -> bool:
        return (index, identity) in self._held

    def add(self, index: int, identity: str, pack: Pack, reasons: list[str]) -> None:
        """Raises StreamError, naming all, when that is one too many. It is in the file then, too: nothing is forgotten."""
        line = {"pack": identity, "index": index, "documents": pack.origins, "reasons": reasons}
        path = RunFolder(self._run_dir).quarantined_packs
        with FileLock(path.with_suffix(".lock")):
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
            listed = read_quarantine(self._run_dir)
        self._held.add((index, identity))
        self._refuse_too_many(listed)

    def _refuse_too_many(self, listed: list[dict[str, Any]]) -> None:
        if len(listed) <= self._most:
            return
        names = "\n".join(
            f"  pack {line['index']} ({line['pack']}): {', '.join(line['documents'])}: {line['reasons'][-1]}"
            for line in listed
        )
        raise StreamError(
            f"{len(listed)} packs could not be produced, more than source.max_quarantined={self._most}:\n{names}",
            where=str(RunFolder(self._run_dir).quarantined_packs),
            fix="something is wrong with the producers or the data: look at logs/producer-*.log; then raise "
            "source.max_quarantined, or delete the file to try these packs again",
        )
