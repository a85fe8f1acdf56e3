"""The ledger: the state of every pack that some trainer rank wants now.

    wanted ──lease──▶ leased ──stored──▶ stored ──consumed──▶ (forgotten)
      ▲                 │ failed, expired   │ lost
      └─────────────────┴──────────────────┘   after max_attempts of these: failed, with every reason

A *want* is one use of a pack: (session of the trainer, index in the plan, pack id). One pack id may be wanted several
times, by several ranks or in several epochs; each want has an object of its own in the store. Everything is in memory and
can be rebuilt: after a restart the ranks want again what they still need, and producers remove the objects that nobody
needs (`reconcile`).

A *session* is one life of the trainer. The first want of a new one makes the ledger drop everything of the one before and
refuse its wants from then on, so that a rank that outlived its trainer can disturb nothing.

The *window* bounds what is in the store, in bytes: the wanted packs are leased lowest index first, and only while the next
one fits beside all objects that are there or under way (`used`) and those that nobody will read but whose producer has not
yet said that they are gone (`garbage`).

A plain state machine: no threads, no input or output, and the clock is an argument.
"""

from __future__ import annotations

import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from .board import Board
from .crew import Crew
from .messages import About, Report
from .ready import Ready
from .wants import FAILED, LEASED, STORED, UNKNOWN, WANTED, Lease, Location, Want, object_key
from .window import Window

_STORE_FORGETS_SECONDS = 10.0  # Mooncake's master drops the objects of a client that has been silent for so long
_STALL_SECONDS = 5.0  # without any movement, before objects of high indices make room for a lower one
_TOTALS = (
    "wanted", "leased", "stored", "consumed", "expired", "failed", "lost", "refused", "retries", "evicted", "bytes",
    "tokens",
)  # fmt: skip


class Retired(Exception):
    """A want of a session that a newer one has replaced."""


@dataclass
class _Entry:
    want: Want
    state: str = WANTED
    lease: str = ""
    producer: str = ""
    leased: float = 0.0
    deadline: float = 0.0
    key: str = ""
    room: int = 0  # bytes in the window: as many as may come while leased, as there are when stored
    checksum: str = ""
    reasons: list[str] = field(default_factory=list)  # one per attempt that came to nothing


class Ledger:
    """See the module's text. `clock` gives seconds that never go back.

    window_bytes: 0 for nine tenths of what the producers lend to the store (no limit if they lend nothing).
    """

    def __init__(self, *, lease_seconds: float, max_attempts: int, clock: Callable[[], float], window_bytes: int = 0):
        self.instance = uuid.uuid4().hex[:12]
        self.session, self.finished = "", False
        self._lease_seconds, self._max_attempts, self._clock = lease_seconds, max_attempts, clock
        self._started = self._moved = clock()
        self._entries: dict[str, _Entry] = {}
        self._ready: Ready[_Entry] = Ready(lambda e: e.state == WANTED and self._entries.get(e.want.id) is e)
        self._leases: OrderedDict[str, _Entry] = OrderedDict()  # producer → what it works on, by deadline
        self._news: set[str] = set()
        self._offers: set[str] = set()
        self._crew = Crew(clock, lease_seconds + _STORE_FORGETS_SECONDS)
        self._window = Window(window_bytes)
        self._retired: set[str] = set()
        self._totals: Counter[str] = Counter()
        self._board = Board(clock)

    # Trainer ranks

    def want(self, wants: Iterable[Want]) -> None:
        """Ask for packs, of one session. Wanting again what is known already changes nothing. Raises Retired."""
        for want in wants:
            if want.session != self.session:
                self._begin(want.session)
            if want.id not in self._entries:
                self._entries[want.id] = entry = _Entry(want)
                self._offer(entry)
                self._totals["wanted"] += 1

    def locate(self, want: str) -> Location:
        """Where a want stands; UNKNOWN after a restart of the ledger, or when it has been consumed."""
        self._pass_time()
        e, progress = self._entries.get(want), self._totals["stored"]
        if e is None:
            return Location(UNKNOWN, progress=progress)
        if e.state != STORED:
            return Location(e.state, reasons=list(e.reasons), progress=progress)
        return Location(STORED, e.key, e.room, e.checksum, e.lease, list(e.reasons), progress)

    def lost(self, want: str, lease: str, reason: str, *, removed: bool = False) -> bool:
        """What `lease` stored is missing, corrupt or refused: produce it again. False if it is not current.

        removed: the rank has seen to it that the object is gone.
        """
        entry = self._entries.get(want)
        if entry is None or entry.state != STORED or entry.lease != lease:
            return False
        self._again(entry, "lost", f"{entry.producer} stored it, but: {reason}", gone=removed)
        return True

    def consumed(self, want: str, lease: str, *, removed: bool = True) -> str:
        """The rank has what it wanted, from `lease`, or does without a pack that failed.

        removed: as for `lost`. Returns the key of another object made for it meanwhile, to be removed, or "".
        """
        entry = self._entries.pop(want, None)
        if entry is None:
            return ""
        self._news.add(want)
        if entry.state == FAILED:
            self._totals["quarantined"] += 1
            return ""
        superfluous = entry.key if entry.state == STORED and entry.lease != lease else ""
        self._totals["consumed"] += 1
        self._board.consumed(entry.room or entry.want.bytes, sum(entry.want.lengths))
        self._release(entry, gone=removed and entry.lease == lease)
        return superfluous

    def report(self, report: Report) -> None:
        """How a rank stands, for people; of a retired session, nothing."""
        if report.session not in self._retired:
            self._board.report(report)

    # Producers

    def lease(self, producer: str, features: str, about: About | None = None) -> Lease | None:
        """The next pack for a producer of these features, lowest index first; None if there is none now, or no room.

        A producer works on one pack at a time: if it already holds a lease, the answer to its last call was lost, and
        it gets the same pack again.
        """
        self._pass_time()
        known = self._crew.see(producer, about)
        entry = self._leases.get(producer)
        if entry is None:
            entry = self._next(features)
            if entry is None:
                return None
            self._totals["leased"] += 1
            entry.state, entry.producer, entry.leased = LEASED, producer, known.seen
            entry.lease = uuid.uuid4().hex[:16]
            entry.key = object_key(entry.want.pack, entry.lease)
            self._occupy(entry, entry.want.bytes)
        entry.deadline = known.seen + self._lease_seconds
        self._leases.pop(producer, None)
        self._leases[producer] = entry  # at the end: it ends last
        w = entry.want
        return Lease(w.id, entry.lease, w.index, w.pack, w.input_ids, w.lengths, self._lease_seconds)

    def stored(self, producer: str, want: str, lease: str, size: int, checksum: str) -> bool:
        """The object of a lease is in the store. False: too late or not wanted (any more); remove the object."""
        self._pass_time()
        known = self._crew.see(producer)
        entry = self._entries.get(want)
        if entry is None or entry.lease != lease or entry.state not in (LEASED, STORED):
            self._refuse(producer, want)
            return False
        if entry.state == STORED:  # a repeated call, whose first answer was lost
            return True
        if size > (most := entry.want.bytes):
            known.failed += 1
            self._again(entry, "failed", f"{producer}: stored {size} bytes, more than the {most} of this pack")
            return False
        del self._leases[entry.producer]
        entry.state, entry.checksum = STORED, checksum
        self._news.add(want)
        self._occupy(entry, size)
        known.stored += 1
        known.bytes += size
        self._totals["stored"] += 1
        self._totals["bytes"] += size
        self._totals["tokens"] += sum(entry.want.lengths)
        return True

    def failed(self, producer: str, want: str, lease: str, reason: str) -> bool:
        """The producer could not do what it leased. False if the lease is not current."""
        self._pass_time()
        known = self._crew.see(producer)
        entry = self._entries.get(want)
        if entry is None or entry.state != LEASED or entry.lease != lease:
            self._refuse(producer, want)
            return False
        known.failed += 1
        self._again(entry, "failed", f"{producer}: {reason}")
        return True

    def untidy(self, producer: str) -> bool:
        """Whether the producer should `reconcile` now: it may hold objects that nobody will read."""
        return self._window.untidy(producer)

    def reconcile(self, producer: str, keys: Iterable[str]) -> list[str]:
        """keys: of all objects that the producer may still have in the store. Returns those that will be read.

        The others may be removed; saying afterwards what is left frees their room in the window.
        """
        self._pass_time()
        self._crew.see(producer)
        self._window.tidy(producer, held := set(keys))
        self._offers.update(self._ready.kinds())
        return sorted(held & {entry.key for entry in self._entries.values()})

    # Everybody

    def take_news(self) -> tuple[set[str], set[str]]:
        """Since the last call: wants of which `locate` says something else, and producers that became untidy; features
        of which there may be something to lease."""
        news, offers = self._news, self._offers
        self._news, self._offers = set(), set()
        return news, offers

    def finish(self) -> None:
        """The run is over: the producers that are here are told to end."""
        self.finished = True
        self._crew.dismiss()

    def dismissed(self, producer: str) -> bool:
        return self._crew.dismissed(producer)

    def window(self) -> dict[str, int]:
        """Bytes. limit: 0 for none. used: of objects that are stored or under way. garbage: see the module's text."""
        window = self._window
        return {"limit": window.limit(self._crew.lent()), "used": window.used, "garbage": window.garbage}

    def snapshot(self) -> dict[str, Any]:
        """The whole state in numbers, for people and for Prometheus; JSON-ready. Times are in seconds."""
        self._pass_time()
        states = Counter(entry.state for entry in self._entries.values())
        return {
            "instance": self.instance,
            "session": self.session,
            "uptime": self._clock() - self._started,
            "lease_seconds": self._lease_seconds,
            "finished": self.finished,
            "packs": {state: states[state] for state in (WANTED, LEASED, STORED, FAILED)},
            "bytes_stored": sum(e.room for e in self._entries.values() if e.state == STORED),
            "window": self.window(),
            "next_index": min((e.want.index for e in self._entries.values()), default=None),
            "totals": {name: self._totals[name] for name in _TOTALS},
            "rates": self._board.rates(),
            "ranks": self._board.ranks(),
            "producers": [{**self._work_of(p["name"]), **p} for p in self._crew.describe()],
            "curve": self._board.curve(),
            "errors": self._board.errors(),
            "failed": [
                {"index": e.want.index, "pack": e.want.pack, "reasons": list(e.reasons)}
                for e in self._entries.values()
                if e.state == FAILED
            ],
            "quarantined": self._totals["quarantined"],
        }

    # Inside

    def _begin(self, session: str) -> None:
        if session in self._retired:
            raise Retired(f"session {session} has been replaced by {self.session}")
        if self.session:
            self._retired.add(self.session)
            for entry in self._entries.values():
                self._release(entry)
            self._news.update(self._entries)
            self._entries.clear()
            self._ready.clear()
            self.instance = uuid.uuid4().hex[:12]
        self.session, self.finished = session, False
        self._crew.dismiss(False)
        self._board.begin(session)

    def _next(self, features: str) -> _Entry | None:
        """The wanted pack with the lowest index, if it fits into the window. No higher one overtakes it."""
        window = self.window()
        taken, limit = window["used"] + window["garbage"], window["limit"]
        while (entry := self._ready.first(features)) is not None:
            if not limit or taken + entry.want.bytes <= limit:
                return entry
            if entry.want.bytes <= limit:
                self._evict_for(entry, limit)
                return None
            reason = (
                f"its {entry.want.bytes} bytes are more than the whole window of {limit}: raise source.window_bytes "
            )
            entry.reasons.append(reason + "or store.segment_bytes, or lower data.pack_tokens")
            entry.state = FAILED
            self._news.add(entry.want.id)
            self._board.error(f"pack {entry.want.index}", entry.reasons[-1])
        return None

    def _evict_for(self, entry: _Entry, limit: int) -> None:
        """If nothing moves any more, make objects of higher indices (made before this pack was wanted) give way.

        Their ranks may all be waiting for lower packs, which would find no room for ever.
        """
        if self._clock() - self._moved < _STALL_SECONDS:
            return
        later = [e for e in self._entries.values() if e.state == STORED and e.want.index > entry.want.index]
        too_much = self._window.used + entry.want.bytes - limit
        if too_much > sum(e.room for e in later):
            return  # lower packs hold the room, and will be consumed
        for victim in sorted(later, key=lambda e: -e.want.index):
            if too_much <= 0:
                break
            too_much -= victim.room
            self._totals["evicted"] += 1
            self._release(victim)
            self._offer(victim)

    def _pass_time(self) -> None:
        """Let leases expire; forget producers that are gone."""
        now = self._clock()
        for entry in list(takewhile(lambda e: now >= e.deadline, self._leases.values())):
            self._crew[entry.producer].expired += 1
            self._again(entry, "expired", f"{entry.producer} has not answered within {self._lease_seconds:g} s")
        for name in self._crew.leave():
            self._window.forget(name)
            self._offers.update(self._ready.kinds())

    def _again(self, entry: _Entry, what: str, reason: str, *, gone: bool = False) -> None:
        """An attempt has come to nothing. what: the total that counts it. gone: no object of it is left."""
        self._totals[what] += 1
        self._board.error(f"pack {entry.want.index}", reason)
        self._release(entry, gone=gone)
        entry.reasons.append(reason)
        if len(entry.reasons) >= self._max_attempts:
            entry.state = FAILED
            self._news.add(entry.want.id)
        else:
            self._offer(entry)
            self._totals["retries"] += 1

    def _release(self, entry: _Entry, *, gone: bool = False) -> None:
        """The entry, leased or stored, is wanted again; its object, unless gone, is garbage."""
        if entry.state not in (LEASED, STORED):
            return
        if entry.state == LEASED:
            del self._leases[entry.producer]
        if not gone and self._crew.present(entry.producer):
            self._window.throw_away(entry.producer, entry.key, entry.room)
            self._news.add(entry.producer)
        self._occupy(entry, 0)
        entry.state = WANTED
        entry.lease = entry.producer = entry.key = entry.checksum = ""

    def _offer(self, entry: _Entry) -> None:
        self._ready.add(entry.want.features, entry.want.index, entry)
        self._offers.add(entry.want.features)

    def _occupy(self, entry: _Entry, room: int) -> None:
        if room < entry.room:
            self._offers.update(self._ready.kinds())
        self._window.used += room - entry.room
        entry.room, self._moved = room, self._clock()

    def _refuse(self, producer: str, want: str) -> None:
        self._totals["refused"] += 1
        self._board.error(producer, f"answered too late, or what nobody wants: {want}")

    def _work_of(self, producer: str) -> dict[str, Any]:
        e = self._leases.get(producer)
        return {"works_on": e and e.want.index, "lease_age": e and self._clock() - e.leased}
