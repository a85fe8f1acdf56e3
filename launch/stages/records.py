"""What the launcher knows from an earlier call of the same run: a second `draftsmith run` does only what is missing.

`<run_dir>/records/<name>.json` holds a result together with a hash of everything that determined it; another hash means
that the result is made again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_pipelines.files import write_text_atomically
from data_pipelines.run_folder import RunFolder


def remembered(run_dir: Path, name: str, depends_on: Any, make: Callable[[], Any]) -> Any:
    """The result of `make`, or of an earlier call. depends_on: any JSON value; result: likewise."""
    path = RunFolder(run_dir).records / f"{name}.json"
    key = hashlib.sha256(json.dumps(depends_on, sort_keys=True, default=str).encode()).hexdigest()
    if path.exists():
        record = json.loads(path.read_text())
        if record["key"] == key:
            return record["result"]
    result = make()
    write_text_atomically(path, json.dumps({"key": key, "result": result}))
    return result
