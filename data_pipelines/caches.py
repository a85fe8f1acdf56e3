"""The user's cache: things that are made once per machine and shared by runs and by concurrent processes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/draftsmith`, or `~/.cache/draftsmith`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftsmith"


def build_once(folder: Path, build: Callable[[Path], None], *, resumable: bool = False) -> Path:
    """`folder`, filled by `build(temporary folder)` unless it is there already.

    Of concurrent processes one builds and the others wait. The folder appears by a rename, so that it is whole or absent
    whoever is killed; what a killed builder left is removed by the next one.
    resumable: what a killed or failed `build` left is given to the next one instead, to go on from.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(folder.name + ".lock")):
        if folder.is_dir():
            return folder
        prefix = f".{folder.name}."
        if resumable:
            temporary = folder.with_name(prefix + "partial")
            temporary.mkdir(exist_ok=True)
        else:
            for stale in folder.parent.glob(prefix + "*"):
                shutil.rmtree(stale, ignore_errors=True)
            temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
        try:
            build(temporary)
            temporary.chmod(0o755)
            temporary.rename(folder)
        except BaseException:
            if not resumable:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
    return folder
