"""The ledger: the state of every pack that some trainer rank wants now.

    wanted ──lease──▶ leased ──stored──▶ stored ──consumed──▶ (forgotten)
      ▲                 │ failed, expired   │ lost
      └─────────────────┴──────────────────┘   after max_attempts of these: failed, with every reason

A *want* is one use of a pack: (index in the plan, pack id). One pack id may be wanted several times, by several ranks
or in several epochs; each want has an object of its own in the store. Everything is in memory and can be rebuilt:
after a restart the ranks want again what they still need, and producers remove the objects that nobody needs
(`still_needed`).

A plain state machine: no threads, no input or output, and the clock is an argument.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

WANTED, LEASED, STORED, FAILED, UNKNOWN = "wanted", "leased", "stored", "failed", "unknown"
_FORGET_PRODUCER_SECONDS = 600.0


def want_id(index: int, pack: str) -> str:
    """The name of one use of a pack: its place in the plan and its id."""
    return f"{index}-{pack}"


def object_key(pack: str, lease: str) -> str:
    """The store's key for what a lease produced. Lease ids are random, hence no key is ever used twice."""
    return f"{pack}-{lease}"


@dataclass(frozen=True)
class Want:
    """features: `FeatureSpec.fingerprint` of what is wanted. A producer needs input_ids [T] and lengths (Σ = T)."""

    index: int
    pack: str
    features: str
    input_ids: list[int]
    lengths: list[int]

    @property
    def id(self) -> str:
        return want_id(self.index, self.pack)


@dataclass(frozen=True)
class Lease:
    """One producer's task, to be done within `seconds`."""

    want: str
    lease: str
    index: int
    pack: str
    input_ids: list[int]
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


@dataclass
class _Entry:
    want: Want
    state: str = WANTED
    lease: str = ""
    producer: str = ""
    deadline: float = 0.0
    key: str = ""
    size: int = 0
    checksum: str = ""
    reasons: list[str] = field(default_factory=list)  # one per attempt that came to nothing


@dataclass
class _Producer:
    seen: float
    stored: int = 0
    failed: int = 0
    expired: int = 0
    bytes: int = 0


class Ledger:
    """See the module's text. `clock` gives seconds that never go back."""

    def __init__(self, *, lease_seconds: float, max_attempts: int, clock: Callable[[], float]):
        self.instance = uuid.uuid4().hex[:12]
        self.finished = False
        self._lease_seconds, self._max_attempts, self._clock = lease_seconds, max_attempts, clock
        self._started = clock()
        self._entries: dict[str, _Entry] = {}
        self._producers: dict[str, _Producer] = {}
        self._totals: Counter[str] = Counter()

    # Trainer ranks

    def want(self, wants: Iterable[Want]) -> None:
        """Ask for packs. Wanting again what is known already changes nothing."""
        for want in wants:
            if want.id not in self._entries:
                self._entries[want.id] = _Entry(want)
                self._totals["wanted"] += 1

    def locate(self, want: str) -> Location:
        """Where a want stands; UNKNOWN after a restart of the ledger, or when it has been consumed."""
        self._expire()
        entry = self._entries.get(want)
        progress = self._totals["stored"]
        if entry is None:
            return Location(UNKNOWN, progress=progress)
        if entry.state != STORED:
            return Location(entry.state, reasons=list(entry.reasons), progress=progress)
        return Location(
            STORED, entry.key, entry.size, entry.checksum, entry.lease, reasons=list(entry.reasons), progress=progress
        )

    def lost(self, want: str, lease: str, reason: str) -> bool:
        """What `lease` stored is missing, corrupt or refused: produce it again. False if it is not current."""
        entry = self._entries.get(want)
        if entry is None or entry.state != STORED or entry.lease != lease:
            return False
        self._totals["lost"] += 1
        self._again(entry, f"{entry.producer} stored it, but: {reason}")
        return True

    def consumed(self, want: str, lease: str) -> str:
        """The rank has what it wanted, from `lease`. Returns the key of another object made for it meanwhile, or ""."""
        entry = self._entries.pop(want, None)
        if entry is None:
            return ""
        self._totals["consumed"] += 1
        return entry.key if entry.state == STORED and entry.lease != lease else ""

    # Producers

    def lease(self, producer: str, features: str) -> Lease | None:
        """The next pack for a producer of these features, lowest index first; None if there is none now.

        A producer works on one pack at a time: if it already holds a lease, the answer to its last call was lost, and
        it gets the same pack again.
        """
        self._expire()
        known = self._see(producer)
        entry = next((e for e in self._entries.values() if e.state == LEASED and e.producer == producer), None)
        if entry is None:
            ready = (e for e in self._entries.values() if e.state == WANTED and e.want.features == features)
            entry = min(ready, key=lambda e: e.want.index, default=None)
            if entry is None:
                return None
            self._totals["leased"] += 1
            entry.state, entry.producer, entry.lease = LEASED, producer, uuid.uuid4().hex[:16]
        entry.deadline = known.seen + self._lease_seconds
        want = entry.want
        return Lease(
            want.id, entry.lease, want.index, want.pack, want.input_ids, want.lengths, seconds=self._lease_seconds
        )

    def stored(self, producer: str, want: str, lease: str, size: int, checksum: str) -> bool:
        """The object of a lease is in the store. False: too late or not wanted (any more); remove the object."""
        self._expire()
        known = self._see(producer)
        entry = self._entries.get(want)
        if entry is None or entry.lease != lease or entry.state not in (LEASED, STORED):
            self._totals["refused"] += 1
            return False
        if entry.state == LEASED:  # else a repeated call, whose first answer was lost
            entry.state, entry.key = STORED, object_key(entry.want.pack, lease)
            entry.size, entry.checksum = size, checksum
            known.stored += 1
            known.bytes += size
            self._totals["stored"] += 1
            self._totals["bytes"] += size
            self._totals["tokens"] += len(entry.want.input_ids)
        return True

    def failed(self, producer: str, want: str, lease: str, reason: str) -> bool:
        """The producer could not do what it leased. False if the lease is not current."""
        self._expire()
        known = self._see(producer)
        entry = self._entries.get(want)
        if entry is None or entry.state != LEASED or entry.lease != lease:
            return False
        known.failed += 1
        self._totals["failed"] += 1
        self._again(entry, f"{producer}: {reason}")
        return True

    def still_needed(self, keys: Iterable[str]) -> list[str]:
        """Those of a producer's objects that somebody will still read. The others may be removed from the store."""
        needed = {entry.key for entry in self._entries.values() if entry.state == STORED}
        return [key for key in keys if key in needed]

    # Everybody

    def finish(self) -> None:
        """The run is over: producers are told to end."""
        self.finished = True

    def snapshot(self) -> dict[str, Any]:
        """The whole state in numbers, for people and for Prometheus; JSON-ready. Ages are in seconds."""
        self._expire()
        now = self._clock()
        leases = {e.producer: e.want.index for e in self._entries.values() if e.state == LEASED}
        self._producers = {
            name: p for name, p in self._producers.items() if now - p.seen < _FORGET_PRODUCER_SECONDS or name in leases
        }
        states = Counter(entry.state for entry in self._entries.values())
        return {
            "instance": self.instance,
            "uptime": now - self._started,
            "finished": self.finished,
            "packs": {state: states[state] for state in (WANTED, LEASED, STORED, FAILED)},
            "bytes_stored": sum(e.size for e in self._entries.values() if e.state == STORED),
            "next_index": min((e.want.index for e in self._entries.values()), default=None),
            "totals": {
                name: self._totals[name]
                for name in (
                    "wanted", "leased", "stored", "consumed", "expired", "failed", "lost", "refused", "bytes", "tokens",
                )
            },
            "producers": [
                {"name": name, "works_on": leases.get(name), **asdict(p), "seen": now - p.seen}
                for name, p in sorted(self._producers.items())
            ],
            "failed": [
                {"index": e.want.index, "pack": e.want.pack, "reasons": e.reasons}
                for e in self._entries.values()
                if e.state == FAILED
            ],
        }  # fmt: skip

    def _see(self, producer: str) -> _Producer:
        known = self._producers.setdefault(producer, _Producer(seen=self._clock()))
        known.seen = self._clock()
        return known

    def _expire(self) -> None:
        now = self._clock()
        for entry in self._entries.values():
            if entry.state == LEASED and now >= entry.deadline:
                self._totals["expired"] += 1
                if entry.producer in self._producers:
                    self._producers[entry.producer].expired += 1
                self._again(entry, f"{entry.producer} has not answered within {self._lease_seconds:g} s")

    def _again(self, entry: _Entry, reason: str) -> None:
        entry.reasons.append(reason)
        entry.state = FAILED if len(entry.reasons) >= self._max_attempts else WANTED
        entry.lease = entry.producer = entry.key = entry.checksum = ""
        entry.size = 0
