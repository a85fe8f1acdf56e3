"""The ledger's state machine, with a clock that the test moves."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from data_pipelines.stream.ledger import Ledger
from data_pipelines.stream.wants import FAILED, LEASED, STORED, UNKNOWN, WANTED, Want, object_key, pack_ids

from .conftest import Clock

FEATURES = "f" * 16


@pytest.fixture
def ledger(clock):
    return Ledger(lease_seconds=10, max_attempts=3, clock=clock)


def want(index: int, pack: str | None = None, features: str = FEATURES) -> Want:
    return Want("s", index, pack or f"pack{index}", features, 1000, pack_ids([1, 2, 3]), [2, 1])


def store(ledger: Ledger, producer: str = "p"):
    lease = ledger.lease(producer, FEATURES)
    assert ledger.stored(producer, lease.want, lease.lease, 7, "sum")
    return lease


def test_a_pack_goes_through_its_states(ledger):
    ledger.want([want(0)])
    assert ledger.locate("s-0-pack0").state == WANTED
    lease = ledger.lease("p", FEATURES)
    assert ledger.locate("s-0-pack0").state == LEASED
    assert (lease.input_ids, lease.lengths, lease.seconds) == (pack_ids([1, 2, 3]), [2, 1], 10)
    assert ledger.stored("p", lease.want, lease.lease, 7, "sum")
    location = ledger.locate("s-0-pack0")
    assert (location.state, location.size, location.checksum) == (STORED, 7, "sum")
    assert location.key == object_key("pack0", lease.lease)
    assert ledger.consumed("s-0-pack0", lease.lease) == ""
    assert ledger.locate("s-0-pack0").state == UNKNOWN


def test_leases_are_handed_out_in_the_order_of_the_plan(ledger):
    ledger.want([want(7), want(3)])
    ledger.want([want(5)])
    assert [ledger.lease(p, FEATURES).index for p in "abc"] == [3, 5, 7]
    assert ledger.lease("d", FEATURES) is None


def test_other_features_are_not_leased(ledger):
    ledger.want([want(0, features="other")])
    assert ledger.lease("p", FEATURES) is None
    assert ledger.lease("p", "other").index == 0


def test_wanting_again_changes_nothing_and_after_consumption_begins_anew(ledger):
    ledger.want([want(0)])
    first = store(ledger)
    ledger.want([want(0)])
    assert ledger.locate("s-0-pack0").state == STORED
    ledger.consumed("s-0-pack0", first.lease)
    ledger.want([want(0)])
    second = store(ledger)
    assert second.lease != first.lease


def test_equal_packs_are_independent(ledger):
    ledger.want([want(0, "same"), want(1, "same")])
    first, second = store(ledger, "a"), store(ledger, "b")
    assert object_key("same", first.lease) != object_key("same", second.lease)
    ledger.consumed(first.want, first.lease)
    assert ledger.locate(second.want).state == STORED


def test_a_late_answer_is_refused_and_the_pack_goes_to_somebody_else(ledger, clock):
    ledger.want([want(0)])
    late = ledger.lease("slow", FEATURES)
    clock.now = 10
    assert not ledger.stored("slow", late.want, late.lease, 7, "sum")
    again = ledger.lease("quick", FEATURES)
    assert again.index == 0 and again.lease != late.lease
    assert not ledger.stored("slow", late.want, late.lease, 7, "sum")
    assert ledger.stored("quick", again.want, again.lease, 7, "sum")
    assert "slow has not answered within 10 s" in ledger.locate("s-0-pack0").reasons[0]


def test_a_lease_that_is_asked_for_again_lasts_longer_and_holds_up_no_others_end(ledger, clock):
    ledger.want([want(0), want(1)])
    first, second = ledger.lease("a", FEATURES), ledger.lease("b", FEATURES)
    clock.now = 9
    assert ledger.lease("a", FEATURES).lease == first.lease
    clock.now = 10
    assert (ledger.locate(first.want).state, ledger.locate(second.want).state) == (LEASED, WANTED)
    clock.now = 19
    assert ledger.locate(first.want).state == WANTED


def test_every_kind_of_failure_counts_and_the_reasons_are_kept(ledger, clock):
    ledger.want([want(0)])
    ledger.lease("a", FEATURES)
    clock.now = 11
    lease = ledger.lease("b", FEATURES)
    assert ledger.failed("b", lease.want, lease.lease, "out of memory")
    lease = store(ledger, "c")
    assert ledger.lost(lease.want, lease.lease, "flipped bit")
    location = ledger.locate("s-0-pack0")
    assert location.state == FAILED
    for reason, word in zip(
        location.reasons, ["a has not answered", "b: out of memory", "c stored it, but: flipped bit"]
    ):
        assert word in reason
    assert ledger.lease("d", FEATURES) is None
    assert ledger.snapshot()["failed"] == [{"index": 0, "pack": "pack0", "reasons": location.reasons}]


def test_repeated_calls_have_the_effect_of_one(ledger):
    ledger.want([want(0), want(1)])
    lease = ledger.lease("p", FEATURES)
    assert ledger.lease("p", FEATURES).lease == lease.lease
    for _ in range(2):
        assert ledger.stored("p", lease.want, lease.lease, 7, "sum")
    assert ledger.snapshot()["totals"]["stored"] == 1
    assert ledger.lost(lease.want, lease.lease, "gone")
    assert not ledger.lost(lease.want, lease.lease, "gone")
    assert len(ledger.locate(lease.want).reasons) == 1


def test_a_consumer_that_was_served_by_the_ledger_before_learns_what_to_remove(ledger, clock):
    ledger.want([want(0)])
    lease = store(ledger)
    restarted = Ledger(lease_seconds=10, max_attempts=3, clock=clock)
    restarted.want([want(0)])
    second = store(restarted)
    assert restarted.consumed("s-0-pack0", lease.lease) == object_key("pack0", second.lease)


def test_only_objects_that_somebody_will_read_are_still_needed(ledger):
    ledger.want([want(0), want(1)])
    first, second = store(ledger), store(ledger)
    keys = [object_key("pack0", first.lease), object_key("pack1", second.lease), "unknown"]
    ledger.consumed(first.want, first.lease)
    assert ledger.reconcile("p", keys) == [keys[1]]


class Stream(RuleBasedStateMachine):
    """Two ranks, three producers and a store under random interleavings, failures, lost objects and restarts.

    The model keeps what a store would hold and what each rank still waits for, and follows the protocol of
    `producer.py` and `sources.py` call by call.
    """

    @initialize()
    def begin(self):
        self.clock = Clock()
        self.ledger = self.new_ledger()
        self.objects: dict[str, str] = {}  # key → want that it was made for
        self.outstanding: dict[str, Want] = {}
        self.consumed: list[str] = []
        self.wanted = 0
        self.working: dict[str, object] = {}
        self.held: dict[str, list[str]] = {p: [] for p in "abc"}
        self.known: dict[str, str] = {p: self.ledger.instance for p in "abc"}

    def new_ledger(self):
        return Ledger(lease_seconds=10, max_attempts=10**6, clock=self.clock)

    @rule(pack=st.sampled_from(["x", "y", "z"]))
    def rank_wants(self, pack):
        item = want(self.wanted, pack)
        self.wanted += 1
        self.outstanding[item.id] = item
        self.ledger.want([item])

    @rule()
    def ranks_want_everything_again(self):
        self.ledger.want(self.outstanding.values())

    @rule(producer=st.sampled_from("abc"))
    def producer_leases(self, producer):
        if producer in self.working:
            return
        lease = self.ledger.lease(producer, FEATURES)
        if self.known[producer] != self.ledger.instance:
            self.known[producer] = self.ledger.instance
            self.reconcile(producer)
        if lease is not None:
            self.working[producer] = lease

    def reconcile(self, producer):
        needed = set(self.ledger.reconcile(producer, self.held[producer]))
        for key in set(self.held[producer]) - needed:
            self.objects.pop(key, None)
        self.held[producer] = sorted(needed)

    @rule(producer=st.sampled_from("abc"))
    def producer_stores(self, producer):
        lease = self.working.pop(producer, None)
        if lease is None:
            return
        key = object_key(lease.pack, lease.lease)
        assert key not in self.objects, "a key was used twice"
        self.objects[key] = lease.want
        if self.ledger.stored(producer, lease.want, lease.lease, 1, "sum"):
            self.held[producer].append(key)
        else:
            del self.objects[key]

    @rule(producer=st.sampled_from("abc"))
    def producer_fails(self, producer):
        lease = self.working.pop(producer, None)
        if lease is not None:
            self.ledger.failed(producer, lease.want, lease.lease, "failed")

    @rule(producer=st.sampled_from("abc"))
    def producer_is_killed(self, producer):
        self.working.pop(producer, None)
        for key in self.held[producer]:
            self.objects.pop(key, None)
        self.held[producer] = []

    @rule(seconds=st.sampled_from([1, 6, 11]))
    def time_passes(self, seconds):
        self.clock.now += seconds

    @rule()
    def ledger_is_restarted(self):
        self.ledger = self.new_ledger()

    @rule()
    def rank_reads(self):
        for name in list(self.outstanding):
            location = self.ledger.locate(name)
            if location.state == UNKNOWN:
                self.ledger.want(self.outstanding.values())
            elif location.state == STORED:
                self.read(name, location)
                return

    def read(self, name, location):
        if location.key not in self.objects:
            assert self.ledger.lost(name, location.lease, "missing")
            return
        assert self.objects.pop(location.key) == name, "the object of another want"
        del self.outstanding[name]
        self.consumed.append(name)
        superfluous = self.ledger.consumed(name, location.lease)
        self.objects.pop(superfluous, None)

    @invariant()
    def each_want_is_consumed_once(self):
        assert len(self.consumed) == len(set(self.consumed))

    def teardown(self):
        """However it went, when everybody works undisturbed everything arrives, and nothing is left in the store."""
        if not hasattr(self, "ledger"):
            return
        for _ in range(4 * self.wanted + 8):
            self.rank_reads()
            for producer in "abc":
                self.producer_leases(producer)
                self.producer_stores(producer)
        assert not self.outstanding
        assert len(self.consumed) == self.wanted
        for producer in "abc":
            self.reconcile(producer)
        assert not self.objects, "an object outlived its want"


TestStream = Stream.TestCase
TestStream.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)


def test_who_comes_after_the_end_stays_for_the_next_training():
    ledger = Ledger(lease_seconds=10, max_attempts=3, clock=lambda: 0.0)
    ledger.lease("early", "f")
    ledger.finish()
    ledger.lease("late", "f")
    assert ledger.dismissed("early") and not ledger.dismissed("late") and not ledger.dismissed("unknown")
    ledger.want([Want("second", 0, "pack", "f", 1000, pack_ids([1]), [1])])
    assert not ledger.finished and not ledger.dismissed("early")
    assert ledger.lease("late", "f") is not None
