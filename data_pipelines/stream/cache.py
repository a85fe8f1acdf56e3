"""Feature files in a folder: the whole of an offline run, or a bounded part of a hybrid one.

A file `<pack id>.safetensors` holds exactly the bytes that an object in a store would. The pack id says what is in it,
so that runs and epochs share a folder and a stale file cannot be hit; files appear whole or not at all, and are
verified whenever they are read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..engines import Engine
from ..errors import FeatureError, UserError
from ..features import Features, FeatureSpec, decode, encode
from ..packing import Pack, pack_id
from ..stores import Full, StoreError
from ..stores.filesystem import sweep_temporaries, write_atomically

log = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
_LOOK_SECONDS = 5.0


class FeatureCache:
    """limit_bytes: once the folder holds as much, `write` writes nothing more; None for no limit.

    The folder may be shared by the ranks of a run. Each adds up its own files and looks at the folder itself every 5
    seconds, so that the limit may be exceeded by what the others write between two looks.
    """

    def __init__(self, folder: Path, spec: FeatureSpec, *, limit_bytes: int | None = None):
        self.folder, self._spec, self._limit = Path(folder), spec, limit_bytes
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder of features: {error.strerror}", where=str(folder)) from error
        sweep_temporaries(self.folder)
        self._held, self._looked = 0, float("-inf")

    def path(self, pack: str) -> Path:
        return self.folder / f"{pack}{_SUFFIX}"

    def has(self, pack: str) -> bool:
        """Whether there is a file; only `read` tells whether it is good."""
        return self.path(pack).exists()

    def read(self, pack: Pack, identity: str) -> Features | None:
        """Verified features, None when there is no file. Raises FeatureError on a file that must not be trained on."""
        try:
            payload = self.path(identity).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise FeatureError(f"reading {self.path(identity)}: {error}") from error
        return decode(payload, pack=identity, input_ids=pack.input_ids, lengths=pack.lengths, spec=self._spec)

    def write(self, identity: str, payload: bytes) -> bool:
        """Keep a verified payload if there is room. False if there is none. Raises StoreError."""
        if self._limit is not None:
            if time.monotonic() - self._looked > _LOOK_SECONDS:
                self._held = _folder_bytes(self.folder)
                self._looked = time.monotonic()
            if self._held + len(payload) > self._limit:
                return False
        write_atomically(self.path(identity), payload)
        self._held += len(payload)
        return True

    def discard(self, identity: str) -> None:
        self.path(identity).unlink(missing_ok=True)


@dataclass(frozen=True)
class Captured:
    """What a capture did: packs computed now, packs found good, bytes written."""

    computed: int = 0
    found: int = 0
    bytes: int = 0


def capture(
    packs: Iterable[Pack], engine: Engine, spec: FeatureSpec, folder: Path, *, shard: int = 0, shards: int = 1
) -> Captured:
    """Fill a folder with the features of `packs` (those of this shard). May be killed and started again at any time.

    Equal packs are computed once. Files that are there already are verified (much cheaper than computing) and kept, or
    replaced. shard of shards: this process takes the distinct packs with number ≡ shard (mod shards).
    Raises UserError when the disk is full.
    """
    cache = FeatureCache(folder, spec)
    distinct: dict[str, Pack] = {}
    for pack in packs:
        distinct.setdefault(pack_id(pack.input_ids, pack.lengths, spec.fingerprint), pack)
    computed = found = size = 0
    for number, (identity, pack) in enumerate(distinct.items()):
        if number % shards != shard:
            continue
        try:
            if cache.read(pack, identity) is not None:
                found += 1
                continue
        except FeatureError as error:
            log.warning("%s is computed again: %s", cache.path(identity), error)
        features = engine.compute(pack.input_ids, pack.lengths)
        payload = encode(features, pack=identity, input_ids=pack.input_ids, lengths=pack.lengths, spec=spec)
        try:
            cache.write(identity, payload)
        except Full as error:
            raise UserError(
                f"the disk is full after {computed} packs of this capture",
                where=str(folder),
                fix="free room and start again (nothing is computed twice), or use source=stream, which keeps no files",
            ) from error
        except StoreError as error:
            raise UserError(f"features cannot be written: {error}", where=str(folder)) from error
        computed += 1
        size += len(payload)
    return Captured(computed, found, size)


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.glob(f"*{_SUFFIX}"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue  # removed by another rank in this moment
    return total
