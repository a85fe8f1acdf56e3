"""A store in a folder that all processes see: simple, slow, and good where there is no network between them.

An object is a file. It appears whole or not at all: written under another name in the same folder, flushed to the disk,
then renamed. A reader therefore never sees half a file, also when the writer is killed.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from pathlib import Path

from ..errors import UserError
from .store import Full, Missing, StoreError

_TEMPORARY = ".writing-"


class FilesystemStore:
    """Objects as files of `folder`. Objects outlive their producer, so that a run should have a folder of its own."""

    def __init__(self, folder: str):
        if not folder:
            raise UserError("the filesystem store has no folder", fix="set store.path to a folder that all can see")
        self._folder = Path(folder)
        self._closed = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder of the store: {error.strerror}", where=folder) from error
        sweep_temporaries(self._folder)

    def put(self, key: str, payload: bytes | memoryview) -> None:
        path = self._path(key)
        if path.exists():
            raise StoreError(f"key {key} is in use; keys are never used twice")
        write_atomically(path, payload)

    def get(self, key: str, size: int) -> bytes:
        try:
            payload = self._path(key).read_bytes()
        except FileNotFoundError:
            raise Missing(f"no object {key}") from None
        except OSError as error:
            raise StoreError(f"reading object {key}: {error}") from error
        if len(payload) != size:
            raise StoreError(f"object {key} has {len(payload)} bytes, not {size}")
        return payload

    def remove(self, key: str) -> None:
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"removing object {key}: {error}") from error

    def close(self) -> None:
        self._closed = True

    def _path(self, key: str) -> Path:
        if self._closed:
            raise StoreError("the store is closed")
        if not key or "/" in key or key.startswith("."):
            raise StoreError(f"{key!r} cannot be a key: it becomes a file name")
        return self._folder / key


def write_atomically(path: Path, payload: bytes | memoryview) -> None:
    """Write a file that other processes see whole or not at all. Raises Full when the disk is full, else StoreError."""
    temporary = path.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
    try:
        with open(temporary, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        kind = Full if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
        raise kind(f"writing {path}: {error.strerror}") from error


def sweep_temporaries(folder: Path, older_than_seconds: float = 3600.0) -> None:
    """Remove what writers that were killed long ago have left."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        try:
            if time.time() - path.stat().st_mtime > older_than_seconds:
                path.unlink(missing_ok=True)
        except FileNotFoundError:
            continue  # another process was quicker
