"""The ledger's window under anything that ranks, producers and time can do, as a state machine."""

from __future__ import annotations

import json
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from data_pipelines.stream.ledger import Retired
from data_pipelines.stream.wants import FAILED, STORED, UNKNOWN, object_key

from .conftest import Clock
from .test_ledger_window import (
    FEATURES,
    LEASE_SECONDS,
    MAX_ATTEMPTS,
    WINDOW,
    new_ledger,
    report,
    row,
    want,
)


class WindowedStream(RuleBasedStateMachine):
    """Two ranks that read in order, three producers and a store, under every kind of disturbance but a ledger's restart.

    The model follows the protocol of `producer.py` and `sources.py` call by call. Objects have sizes; those of a producer
    that has been silent for as long as Mooncake waits are dropped.
    """

    @initialize()
    def begin(self):
        self.clock = Clock()
        self.ledger = new_ledger(self.clock)
        self.session, self.old_sessions = "session0", []
        self.ranks = [deque(), deque()]
        self.next_index = [0, 1]
        self.arrived: set[str] = set()
        self.objects: dict[str, tuple[str, int]] = {}  # key → producer, size
        self.keys: set[str] = set()
        self.names = ["a", "b", "c"]
        self.working: dict[str, tuple] = {}  # producer → lease, when it began
        self.held: dict[str, list[str]] = {}
        self.seen: dict[str, float] = {}
        self.sizes: dict[str, int] = {}

    ranks_ = st.sampled_from([0, 1])
    producers_ = st.sampled_from([0, 1, 2])

    @rule(rank=ranks_, sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3))
    def rank_wants(self, rank, sizes):
        for size in sizes:
            if len(self.ranks[rank]) < 5:
                item = want(self.next_index[rank], size, self.session)
                self.next_index[rank] += 2
                self.sizes[item.id] = size
                self.ranks[rank].append(item)
        self.ledger.want(self.ranks[rank])

    @rule()
    def the_trainer_is_restarted(self):
        if self.ledger.session == self.session:  # else it has not wanted anything yet
            self.old_sessions.append(self.session)
        self.session = f"session{len(self.old_sessions)}"
        self.ranks, self.next_index = [deque(), deque()], [0, 1]
        self.ledger.report(report(session=self.session))

    @rule(number=st.integers(0, 3))
    def somebody_of_an_old_session_is_still_there(self, number):
        if number >= len(self.old_sessions) or self.ledger.session != self.session:
            return
        before = self.ledger.snapshot()["packs"]
        with pytest.raises(Retired):
            self.ledger.want([want(0, 1, self.old_sessions[number])])
        self.ledger.report(report(session=self.old_sessions[number], rows=[row(77)]))
        assert self.ledger.snapshot()["packs"] == before
        assert not self.ledger.snapshot()["curve"]

    @rule(producer=producers_, size_less=st.integers(0, 1))
    def producer_leases(self, producer, size_less=0):
        name = self.names[producer]
        if name in self.working:
            return
        lease = self.ledger.lease(name, FEATURES)
        self.seen[name] = self.clock.now
        if self.ledger.untidy(name):
            self.reconcile(name)
        if lease is not None:
            self.working[name] = lease, self.clock.now, max(1, self.sizes[lease.want] - size_less)

    def reconcile(self, name):
        needed = set(self.ledger.reconcile(name, self.held.get(name, [])))
        for key in set(self.held.get(name, [])) - needed:
            self.objects.pop(key, None)
        self.held[name] = sorted(needed)
        self.ledger.reconcile(name, self.held[name])
        self.seen[name] = self.clock.now

    @rule(producer=producers_)
    def producer_puts(self, producer):
        name = self.names[producer]
        if name not in self.working:
            return
        lease, began, size = self.working[name]
        key = object_key(lease.pack, lease.lease)
        if key not in self.keys and self.clock.now <= began + lease.seconds:
            self.keys.add(key)
            self.objects[key] = name, size
            self.held.setdefault(name, []).append(key)

    @rule(producer=producers_)
    def producer_reports(self, producer):
        name = self.names[producer]
        if name not in self.working:
            return
        lease, _, size = self.working.pop(name)
        self.seen[name] = self.clock.now
        key = object_key(lease.pack, lease.lease)
        if key not in self.keys:
            self.ledger.failed(name, lease.want, lease.lease, "too late")
        elif not self.ledger.stored(name, lease.want, lease.lease, size, "sum"):
            self.objects.pop(key, None)
            if key in self.held[name]:
                self.held[name].remove(key)

    @rule(producer=producers_)
    def producer_fails(self, producer):
        name = self.names[producer]
        if name in self.working:
            lease, _, _ = self.working.pop(name)
            self.seen[name] = self.clock.now
            self.ledger.failed(name, lease.want, lease.lease, "failed")

    @rule(producer=producers_)
    def producer_is_replaced(self, producer):
        name = self.names[producer]
        self.working.pop(name, None)
        self.held.pop(name, None)
        self.objects = {key: kept for key, kept in self.objects.items() if kept[0] != name}
        self.names[producer] = name + name[0]

    @rule(seconds=st.sampled_from([1, 6, 11]))
    def time_passes(self, seconds):
        self.clock.now += seconds
        silent = {n for n, seen in self.seen.items() if self.clock.now - seen >= LEASE_SECONDS + 10}
        self.objects = {key: kept for key, kept in self.objects.items() if kept[0] not in silent}

    @rule(rank=ranks_, luck=st.sampled_from(["good", "good", "corrupt", "corrupt and not removed"]))
    def rank_reads(self, rank, luck="good"):
        if not self.ranks[rank]:
            return
        item = self.ranks[rank][0]
        location = self.ledger.locate(item.id)
        assert len(location.reasons) <= MAX_ATTEMPTS
        if location.state == UNKNOWN:
            self.ledger.want(self.ranks[rank])
        elif location.state == FAILED:
            self.ledger.consumed(item.id, "")
            self.arrive(rank)
        elif location.state == STORED:
            there = location.key in self.objects
            if luck != "corrupt and not removed":
                self.objects.pop(location.key, None)
            if luck == "good" and there:
                superfluous = self.ledger.consumed(item.id, location.lease)
                assert superfluous == ""
                self.arrive(rank)
            else:
                assert self.ledger.lost(item.id, location.lease, "corrupt", removed=luck == "corrupt")

    def arrive(self, rank):
        name = self.ranks[rank].popleft().id
        assert name not in self.arrived, "consumed twice"
        self.arrived.add(name)

    @invariant()
    def the_window_is_kept(self):
        if hasattr(self, "ledger"):
            status = self.ledger.snapshot()
            window = status["window"]
            assert window["used"] >= 0 and window["used"] + window["garbage"] <= WINDOW
            assert sum(size for _, size in self.objects.values()) <= WINDOW, "in the store itself"
            working = [p["works_on"] for p in status["producers"] if p["works_on"] is not None]
            assert len(working) == status["packs"]["leased"], "at most one lease a producer"
            assert json.loads(json.dumps(status, allow_nan=False)) == status

    def teardown(self):
        """However it went, when everybody works undisturbed everything arrives, and nothing is left in the store."""
        if not hasattr(self, "ledger"):
            return
        self.rank_wants(0, [1])
        for _ in range(200):
            for rank in (0, 1):
                self.ledger.want(self.ranks[rank])
                self.rank_reads(rank)
            for producer in range(3):
                self.producer_leases(producer)
                self.producer_puts(producer)
                self.producer_reports(producer)
            if not any(self.ranks):
                break
            self.time_passes(1)
        assert not any(self.ranks), "a pack never arrives"
        self.time_passes(11)
        for name in self.names:
            self.ledger.lease(name, "other features")
            self.reconcile(name)
        self.clock.now += 10
        window = self.ledger.snapshot()["window"]
        assert (window["used"], window["garbage"]) == (0, 0)
        assert not self.objects, "an object outlived its want"


TestWindowedStream = WindowedStream.TestCase
TestWindowedStream.settings = settings(max_examples=200, stateful_step_count=50, deadline=None, derandomize=True)
