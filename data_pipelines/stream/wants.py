"""What the ledger is asked for, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

WANTED, LEASED, STORED, FAILED, UNKNOWN = "wanted", "leased", "stored", "failed", "unknown"


def pack_ids(ids: npt.ArrayLike) -> bytes:
    """Token ids [T] as they travel: int32, little-endian. A list of numbers would cost the ledger more than all else."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(packed: bytes) -> np.ndarray:
    """int32 [T]; it may be written to."""
    return np.frombuffer(packed, dtype="<i4").astype(np.int32)


def want_id(session: str, index: int, pack: str) -> str:
    """The name of one use of a pack: who uses it (a trainer's session), its place in the plan and its id."""
    return f"{session}-{index}-{pack}"


def object_key(pack: str, lease: str) -> str:
    """The store's key for what a lease produced. Lease ids are random, hence no key is ever used twice."""
    return f"{pack}-{lease}"


@dataclass(frozen=True)
class Want:
    """session: of the trainer, new at each of its starts. features: `FeatureSpec.fingerprint` of what is wanted.

    bytes: the most that the payload will have. A producer needs input_ids (`pack_ids` of [T]) and lengths (Σ = T).
    """

    session: str
    index: int
    pack: str
    features: str
    bytes: int
    input_ids: bytes
    lengths: list[int]

    @property
    def id(self) -> str:
        return want_id(self.session, self.index, self.pack)


@dataclass(frozen=True)
class Lease:
    """One producer's task, to be done within `seconds`."""

    want: str
    lease: str
    index: int
    pack: str
    input_ids: bytes
    lengths: list[int]
    seconds: float


@dataclass(frozen=True)
class Location:
    """What is known about a want. key, size [bytes], checksum and lease are those of the stored object.

    progress: packs that this ledger has seen stored so far, of any want; its growth shows that the stream is alive.
    """

    state: str
    key: str = ""
    size: int = 0
    checksum: str = ""
    lease: str = ""
    reasons: list[str] = field(default_factory=list)
    progress: int = 0
