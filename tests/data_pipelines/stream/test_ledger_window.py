"""The ledger's byte window and its sessions, with a clock that the test moves."""

from __future__ import annotations

import pytest

from data_pipelines.stream.ledger import Ledger, Retired
from data_pipelines.stream.messages import About, Report
from data_pipelines.stream.wants import FAILED, LEASED, STORED, UNKNOWN, WANTED, Want, object_key, pack_ids

from .conftest import Clock

FEATURES = "f" * 16
LEASE_SECONDS = 10
WINDOW = 10
MAX_ATTEMPTS = 4


def new_ledger(clock: Clock, window_bytes: int = WINDOW) -> Ledger:
    return Ledger(lease_seconds=LEASE_SECONDS, max_attempts=MAX_ATTEMPTS, clock=clock, window_bytes=window_bytes)


@pytest.fixture
def ledger(clock):
    return new_ledger(clock)


def want(index: int, size: int = 4, session: str = "s") -> Want:
    return Want(session, index, f"pack{index}", FEATURES, size, pack_ids([1, 2, 3]), [2, 1])


def store(ledger: Ledger, producer: str = "p", size: int | None = None):
    lease = ledger.lease(producer, FEATURES)
    assert lease is not None
    assert ledger.stored(producer, lease.want, lease.lease, 4 if size is None else size, "sum")
    return lease


def tidy(ledger: Ledger, producer: str, held: list[str]) -> list[str]:
    """As a producer does it: ask, remove the others, say what is left."""
    needed = ledger.reconcile(producer, held)
    assert ledger.reconcile(producer, needed) == needed
    return needed


# The window


def test_what_does_not_fit_is_not_leased_until_something_is_consumed(ledger):
    ledger.want([want(i) for i in range(3)])
    first, _ = store(ledger, "a"), store(ledger, "b")
    assert ledger.lease("c", FEATURES) is None
    assert ledger.window() == {"limit": 10, "used": 8, "garbage": 0}
    ledger.consumed(first.want, first.lease)
    assert ledger.lease("c", FEATURES).index == 2


def test_what_is_stored_takes_its_own_size_only(ledger):
    ledger.want([want(i) for i in range(3)])
    store(ledger, "a", size=3), store(ledger, "b", size=3)
    assert ledger.lease("c", FEATURES).index == 2


def test_a_small_pack_does_not_overtake_a_large_one(ledger):
    ledger.want([want(0, 7), want(1, 7), want(2, 1)])
    store(ledger, "a", size=7)
    assert ledger.lease("b", FEATURES) is None


def test_a_pack_that_can_never_fit_fails_at_once_and_says_why(ledger):
    ledger.want([want(0, 11), want(1, 10)])
    assert ledger.lease("p", FEATURES).index == 1
    location = ledger.locate("s-0-pack0")
    assert location.state == FAILED
    assert "11 bytes are more than the whole window of 10" in location.reasons[0]
    assert ledger.snapshot()["errors"][-1]["who"] == "pack 0"


def test_more_than_was_announced_is_refused_as_a_failed_attempt(ledger):
    ledger.want([want(0)])
    lease = ledger.lease("p", FEATURES)
    assert not ledger.stored("p", lease.want, lease.lease, 5, "sum")
    assert "stored 5 bytes, more than the 4" in ledger.locate(lease.want).reasons[0]
    assert ledger.window()["garbage"] == 4 and ledger.untidy("p")


def test_the_window_is_nine_tenths_of_what_the_living_producers_lend(clock):
    ledger = new_ledger(clock, window_bytes=0)
    ledger.want([want(i, 50) for i in range(4)])
    assert ledger.window()["limit"] == 0
    assert ledger.lease("a", FEATURES, About(capacity=100)).index == 0
    assert ledger.window()["limit"] == 90
    assert ledger.lease("b", FEATURES, About(capacity=100)).index == 1
    assert ledger.window() == {"limit": 180, "used": 100, "garbage": 0}
    clock.now = LEASE_SECONDS + 10
    assert ledger.lease("b", FEATURES, About(capacity=100)).index == 0
    assert ledger.window()["limit"] == 90


def test_without_memory_lent_there_is_no_limit(clock):
    ledger = new_ledger(clock, window_bytes=0)
    ledger.want([want(0, 2**50)])
    assert ledger.lease("p", FEATURES, About()).index == 0


# Garbage


def test_room_of_a_lost_object_is_free_when_its_producer_or_its_reader_has_removed_it(ledger):
    ledger.want([want(0, 10)])
    lease = store(ledger, "p", size=10)
    key = object_key("pack0", lease.lease)
    assert ledger.lost(lease.want, lease.lease, "corrupt")
    assert ledger.window() == {"limit": 10, "used": 0, "garbage": 10}
    assert ledger.lease("q", FEATURES) is None
    assert ledger.untidy("p") and not ledger.untidy("q")
    assert ledger.reconcile("p", [key]) == []
    assert ledger.window()["garbage"] == 10, "asked, but not yet removed"
    assert not ledger.untidy("p"), "it knows"
    assert ledger.reconcile("p", []) == []
    again = store(ledger, "q", size=10)
    assert ledger.lost(again.want, again.lease, "corrupt", removed=True)
    assert ledger.window()["garbage"] == 0


def test_garbage_of_a_producer_that_is_gone_is_forgotten(ledger, clock):
    ledger.want([want(0, 10)])
    ledger.lease("dead", FEATURES)
    clock.now = LEASE_SECONDS
    assert ledger.lease("q", FEATURES) is None, "it may still put what it leased"
    clock.now = LEASE_SECONDS + 10
    assert ledger.lease("q", FEATURES).index == 0


def test_what_is_leased_when_it_is_consumed_is_garbage(ledger, clock):
    """The rank had it from the ledger before this one, or in spite of a report that it was lost."""
    ledger.want([want(0)])
    lease = ledger.lease("p", FEATURES)
    assert ledger.consumed(lease.want, "of another ledger") == ""
    assert ledger.window() == {"limit": 10, "used": 0, "garbage": 4}
    assert not ledger.stored("p", lease.want, lease.lease, 4, "sum")
    tidy(ledger, "p", [])
    assert ledger.window()["garbage"] == 0


def test_high_objects_give_way_to_a_low_pack_only_when_nothing_moves(ledger, clock):
    """Rank 0 has filled the window before rank 1 wants its first pack; rank 0 waits for a pack that failed meanwhile."""
    ledger.want([want(i) for i in (2, 4)])
    first, second = store(ledger, "a"), store(ledger, "b")
    assert ledger.lease("c", FEATURES) is None
    ledger.want([want(1)])
    assert ledger.lease("c", FEATURES) is None
    assert ledger.locate(second.want).state == STORED, "its rank may be about to read it"
    clock.now = 5
    assert ledger.lease("c", FEATURES) is None
    assert (ledger.locate(first.want).state, ledger.locate(second.want).state) == (STORED, WANTED)
    assert ledger.locate(second.want).reasons == [], "not an attempt that failed"
    assert ledger.untidy("b") and tidy(ledger, "b", [object_key("pack4", second.lease)]) == []
    assert ledger.lease("c", FEATURES).index == 1
    assert ledger.snapshot()["totals"]["evicted"] == 1
    ledger.consumed(first.want, first.lease)
    assert ledger.lease("d", FEATURES).index == 4, "what gave way has its turn when there is room again"


def test_nothing_gives_way_where_that_would_not_help(ledger, clock):
    ledger.want([want(0), want(9, 2)])
    store(ledger, "a"), store(ledger, "b", size=2)
    ledger.want([want(5, 7)])
    clock.now = 60
    assert ledger.lease("c", FEATURES) is None
    assert ledger.snapshot()["packs"]["stored"] == 2


# Sessions


def test_a_new_session_drops_the_old_one_and_refuses_it_from_then_on(ledger):
    ledger.want([want(0, session="old"), want(1, session="old"), want(2, 2, session="old")])
    first, second = store(ledger, "a"), ledger.lease("b", FEATURES)
    instance = ledger.instance
    ledger.want([want(0, session="new")])
    assert ledger.session == "new" and ledger.instance != instance
    assert ledger.locate(first.want).state == UNKNOWN
    assert ledger.snapshot()["packs"] == {WANTED: 1, LEASED: 0, STORED: 0, FAILED: 0}
    assert ledger.window() == {"limit": 10, "used": 0, "garbage": 8}
    assert not ledger.stored("b", second.want, second.lease, 4, "sum")
    with pytest.raises(Retired):
        ledger.want([want(7, session="old")])
    assert ledger.session == "new" and ledger.locate("old-7-pack7").state == UNKNOWN
    ledger.consumed(first.want, first.lease)
    assert ledger.locate("new-0-pack0").state == WANTED
    for producer in "ab":
        tidy(ledger, producer, [])
    assert ledger.lease("b", FEATURES).want == "new-0-pack0"


def test_the_first_session_is_nothing_new(ledger):
    instance = ledger.instance
    ledger.want([want(0)])
    ledger.want([want(1)])
    assert ledger.instance == instance


# What is shown


def report(rank: int = 0, session: str = "s", rows: list | None = None, **values) -> Report:
    base = {"rank": rank, "world_size": 2, "host": "h", "pid": 7, "session": session, "step": 3, "total_steps": 9}
    return Report(**{**base, "wait_fraction": 0.25, "rows": rows or [], **values})


def row(step: int, **values) -> dict:
    return {"step": step, "loss": 2.0, "wait_seconds": 1.0, "seconds": 4.0, "tokens": 100, **values}


def test_ranks_and_curve_are_those_of_the_present_session(ledger, clock):
    ledger.want([want(0, session="old")])
    ledger.report(report(0, "old", rows=[row(1), row(2, seconds=0)]))
    ledger.report(report(1, "old"))
    clock.now = 2
    status = ledger.snapshot()
    assert [(r["rank"], r["seen"], r["wait_fraction"]) for r in status["ranks"]] == [(0, 2, 0.25), (1, 2, 0.25)]
    assert status["curve"][0] == {
        "step": 1, "loss": 2.0, "expected_length": None, "wait_fraction": 0.25, "tokens_per_second": 25.0,
    }  # fmt: skip
    assert status["curve"][1]["tokens_per_second"] is None
    ledger.report(report(0, "new"))
    ledger.want([want(0, session="new")])
    ledger.report(report(1, "old", rows=[row(9)]))
    status = ledger.snapshot()
    assert [r["rank"] for r in status["ranks"]] == [0] and status["curve"] == []


def test_the_curve_is_thinned_and_keeps_its_ends(ledger):
    for start in range(0, 5000, 500):
        ledger.report(report(rows=[row(step) for step in range(start, start + 500)]))
    steps = [point["step"] for point in ledger.snapshot()["curve"]]
    assert steps == sorted(set(steps)) and 250 <= len(steps) <= 1000
    assert (steps[0], steps[-1]) == (0, 4999)
    ledger.report(report(rows=[row(4999, loss=1.0)]))
    assert ledger.snapshot()["curve"][-1]["loss"] == 1.0


def test_rates_are_those_of_the_last_half_minute(ledger, clock):
    ledger.want([want(i, 3) for i in range(3)])
    for _ in range(3):
        lease = store(ledger, size=3)
        ledger.consumed(lease.want, lease.lease)
    rates = ledger.snapshot()["rates"]
    assert rates == {"packs_per_second": 0.1, "bytes_per_second": 0.3, "tokens_per_second": 0.3}
    clock.now = 31
    assert set(ledger.snapshot()["rates"].values()) == {0}


def test_a_failed_pack_that_its_rank_does_without_is_quarantined(ledger):
    ledger.want([want(0, 11)])
    assert ledger.lease("p", FEATURES) is None
    assert ledger.consumed("s-0-pack0", "") == ""
    status = ledger.snapshot()
    assert (status["quarantined"], status["totals"]["consumed"], status["failed"]) == (1, 0, [])


def test_producers_say_how_they_spend_their_time(ledger, clock):
    ledger.want([want(3)])
    ledger.lease("p", FEATURES, About(host="h", pid=4, capacity=5, compute_seconds=6, idle_seconds=7))
    clock.now = 2
    [producer] = ledger.snapshot()["producers"]
    assert producer == {
        "name": "p", "host": "h", "pid": 4, "works_on": 3, "lease_age": 2, "stored": 0, "failed": 0, "expired": 0,
        "bytes": 0, "capacity": 5, "compute_seconds": 6, "put_seconds": 0, "idle_seconds": 7, "seen": 2,
    }  # fmt: skip


def test_the_last_errors_are_kept(ledger, clock):
    ledger.want([want(0)])
    lease = ledger.lease("p", FEATURES)
    ledger.failed("p", lease.want, lease.lease, "x" * 5000)
    clock.now = 4
    assert not ledger.failed("p", lease.want, lease.lease, "again")
    first, second = ledger.snapshot()["errors"]
    assert (first["ago"], first["who"], len(first["message"])) == (4, "pack 0", 500)
    assert (second["ago"], second["who"]) == (0, "p")
