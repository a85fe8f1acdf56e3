"""The system libraries that Mooncake needs, and its master's binary: found, or a message that says how to get them.

Mooncake's wheel links to libibverbs even where only TCP is used. Where nobody may install system packages, `make setup`
unpacks them into `<venv>/syslibs`; this module loads them from there.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import stat
import sys
from pathlib import Path

from ..errors import UserError

REQUIRED = ("libibverbs.so.1", "libnuma.so.1", "libcurl.so.4")
FIX = "make setup (or, as root: apt-get install -y --no-install-recommends libibverbs1 libnuma1 libcurl4)"


def library_path() -> str:
    """The folders under `<venv>/syslibs` with shared libraries, joined by ":" for LD_LIBRARY_PATH; or ""."""
    root = Path(sys.prefix) / "syslibs"
    multiarch = f"{platform.machine()}-linux-gnu"
    folders = [root / "usr" / "lib" / multiarch, root / "lib" / multiarch, root / "usr" / "lib", root / "lib"]
    return ":".join(str(folder) for folder in folders if any(folder.glob("*.so*")))


def load_libraries() -> None:
    """Make the libraries that Mooncake links to available to this process. Raises UserError naming what is missing.

    A library that was loaded by its path serves later look-ups by its name, so that no environment variable is needed.
    """
    missing = [name for name in REQUIRED if not _loads(name)]
    if missing and library_path():
        _load_all([Path(folder) for folder in library_path().split(":")])
        missing = [name for name in REQUIRED if not _loads(name)]
    if missing:
        raise UserError(f"Mooncake needs {', '.join(missing)}, which this machine does not have", fix=FIX)


def find_master() -> Path:
    """The `mooncake_master` binary of the installed wheel. Raises UserError when it, or a library of it, is missing.

    Start it with library_path() in its LD_LIBRARY_PATH.
    """
    found = importlib.util.find_spec("mooncake")
    if found is None or not found.submodule_search_locations:
        raise UserError("Mooncake is not installed", fix="make setup, or choose store=filesystem")
    binary = Path(found.submodule_search_locations[0]) / "mooncake_master"
    if not binary.exists():
        raise UserError("the installed Mooncake has no mooncake_master", where=str(binary.parent), fix="make setup")
    load_libraries()
    if not os.access(binary, os.X_OK):  # wheels do not keep the executable bit everywhere
        binary.chmod(binary.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return binary


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _load_all(folders: list[Path]) -> None:
    """Load every library of the folders; those that need another one get their turn after it."""
    waiting = [path for folder in folders for path in sorted(folder.glob("*.so*"))]
    while waiting:
        failed = [path for path in waiting if not _loads(str(path))]
        if len(failed) == len(waiting):
            return
        waiting = failed
