"""The seal of a checkpoint: `run.json`, which says of every other file in the folder how long it is and what is in it.

It is written last and checked before anything of the checkpoint is read: a disk that lost or turned a bit, a copy that
ended early, a file that somebody removed are noticed, and never trained on.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

RUN_FILE = "run.json"
_CHUNK_BYTES = 8 * 1024**2  # that much of each file is in memory while it is read
_READERS = 8


class Broken(Exception):
    """A checkpoint that must not be loaded. The message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Seal:
    """step: optimizer steps that are done. identity: what decided the weights (`RunSetup.identity`). files: of each file
    its size in bytes and its xxh3-128."""

    step: int
    identity: dict[str, Any]
    files: dict[str, tuple[int, str]]

    @property
    def checksum(self) -> str:
        """xxh3-64 over everything above, as 16 hexadecimal digits."""
        return xxhash.xxh3_64_hexdigest(json.dumps(asdict(self), sort_keys=True).encode())


def seal(folder: Path, step: int, identity: dict[str, Any]) -> None:
    """Write the seal of a finished checkpoint, and see to it that it is on the disk. Every file is read once."""
    files = sorted(path for path in folder.iterdir() if path.name != RUN_FILE)
    made = Seal(step, identity, {path.name: found for path, found in zip(files, _digests(files), strict=True)})
    with (folder / RUN_FILE).open("w") as file:
        json.dump({**asdict(made), "checksum": made.checksum}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync(folder)


def read_seal(folder: Path) -> Seal:
    """What the seal says, without a look at the other files. Raises Broken when it is missing or damaged itself."""
    try:
        stated = json.loads((folder / RUN_FILE).read_text())
        checksum = stated.pop("checksum")
        files = {name: (size, digest) for name, (size, digest) in stated.pop("files").items()}
        read = Seal(files=files, **stated)
    except FileNotFoundError:
        raise Broken(f"{RUN_FILE} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Broken(f"{RUN_FILE} cannot be read: {error}") from error
    if read.checksum != checksum:
        raise Broken(f"{RUN_FILE} is corrupt: its checksum is {read.checksum}, stated {checksum}")
    return read


def verify(folder: Path) -> Seal:
    """Read every file and compare it with the seal. Raises Broken at the first that differs."""
    stated = read_seal(folder)
    paths = [folder / name for name in stated.files]
    for path in paths:
        wanted = stated.files[path.name][0]
        try:
            size = path.stat().st_size
        except OSError as error:
            raise Broken(f"{path.name} is missing ({error.strerror})") from error
        if size != wanted:
            raise Broken(f"{path.name} has {size} bytes, not {wanted}")
    try:
        found = _digests(paths)
    except OSError as error:
        raise Broken(f"{error.filename}: {error.strerror}") from error
    for path, (_, digest) in zip(paths, found, strict=True):
        if digest != stated.files[path.name][1]:
            raise Broken(f"{path.name} is corrupt: its checksum is {digest}, stated {stated.files[path.name][1]}")
    return stated


def sync(path: Path) -> None:
    """Put a file or a folder on the disk: names, too, are only safe from a power failure once their folder is there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digests(paths: list[Path]) -> list[tuple[int, str]]:
    with ThreadPoolExecutor(_READERS) as readers:
        return list(readers.map(_digest, paths))


def _digest(path: Path) -> tuple[int, str]:
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()
