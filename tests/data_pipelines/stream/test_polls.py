"""Who is woken by what: a long poll ends when there is something for it, and only then. Polls last for ever here."""

from __future__ import annotations

import asyncio
import time

import pytest

from data_pipelines.stream import server
from data_pipelines.stream.ledger import Ledger
from data_pipelines.stream.messages import LeaseRequest, LocateRequest, StoredRequest
from data_pipelines.stream.polls import Polls
from data_pipelines.stream.server import LedgerServer
from data_pipelines.stream.wants import STORED, UNKNOWN, Want, pack_ids

LONG = 3600.0


class Caller:
    """What a handler knows of the other side."""

    def __init__(self):
        self.gone = False
        self.looked = 0

    async def is_disconnected(self) -> bool:
        self.looked += 1
        return self.gone


@pytest.fixture
def serving(monkeypatch) -> LedgerServer:
    monkeypatch.setattr(server, "MAX_WAIT_SECONDS", LONG)
    return LedgerServer(Ledger(lease_seconds=60, max_attempts=3, clock=time.monotonic, window_bytes=30), "token", {})


def want(index: int, session: str = "s", features: str = "f") -> Want:
    return Want(session, index, f"pack{index}", features, 10, pack_ids([1]), [1])


async def begin(coroutine) -> asyncio.Task:
    """It runs until it waits."""
    task = asyncio.create_task(coroutine)
    for _ in range(5):
        await asyncio.sleep(0)
    return task


def lease(serving: LedgerServer, name: str, caller: Caller | None = None, features: str = "f"):
    return serving._lease(LeaseRequest(producer=name, features=features, wait=LONG), caller or Caller())


def locate(serving: LedgerServer, index: int, caller: Caller | None = None):
    return serving._locate(LocateRequest(want=want(index).id, wait=LONG), caller or Caller())


def tell(serving: LedgerServer, *wants: Want) -> None:
    serving.ledger.want(wants)
    serving._spread_news()


async def ended(*tasks: asyncio.Task) -> list:
    return await asyncio.wait_for(asyncio.gather(*tasks), 20)


def test_as_many_producers_are_woken_as_there_are_packs(serving):
    async def run() -> None:
        callers = [Caller() for _ in range(4)]
        waiting = [await begin(lease(serving, f"p{i}", caller)) for i, caller in enumerate(callers)]
        tell(serving, want(0), want(1))
        first, second = await ended(*waiting[:2])
        assert [answer["lease"]["index"] for answer in (first, second)] == [0, 1]
        assert callers[3].looked == 0 and not waiting[2].done() and not waiting[3].done()
        serving.ledger.finish()
        serving._polls.wake_all()
        assert all(answer["finished"] for answer in await ended(*waiting[2:]))

    asyncio.run(run())


def test_what_a_producer_that_has_gone_was_woken_for_goes_to_the_next(serving):
    async def run() -> None:
        caller = Caller()
        gone, other = await begin(lease(serving, "gone", caller)), await begin(lease(serving, "other"))
        caller.gone = True
        tell(serving, want(0))
        (nothing, something) = await ended(gone, other)
        assert nothing["lease"] is None and something["lease"]["index"] == 0

    asyncio.run(run())


def test_room_in_the_window_wakes_a_producer(serving):
    """It holds three packs. A fourth is leased when one was consumed and removed."""

    async def run() -> None:
        tell(serving, *(want(i) for i in range(4)))
        leases = [(await lease(serving, f"p{i}"))["lease"] for i in range(3)]
        fourth = await begin(lease(serving, "p3"))
        held = leases[0]
        stored = StoredRequest(producer="p0", want=held["want"], lease=held["lease"], size=10, checksum="c")
        assert (await serving._stored(stored, Caller()))["accepted"]
        serving._spread_news()
        assert not fourth.done()
        serving.ledger.consumed(held["want"], held["lease"])
        serving._spread_news()
        (answer,) = await ended(fourth)
        assert answer["lease"]["index"] == 3

    asyncio.run(run())


def test_a_rank_is_woken_by_its_own_pack_only(serving):
    async def run() -> None:
        tell(serving, want(0), want(1))
        callers = [Caller(), Caller()]
        first, second = [await begin(locate(serving, i, caller)) for i, caller in enumerate(callers)]
        held = (await lease(serving, "p"))["lease"]
        serving.ledger.stored("p", held["want"], held["lease"], 10, "c")
        serving._spread_news()
        assert (await ended(first))[0]["state"] == STORED and not second.done() and callers[1].looked == 0
        tell(serving, want(0, session="newer"))
        assert (await ended(second))[0]["state"] == UNKNOWN

    asyncio.run(run())


def test_a_producer_with_garbage_is_woken_to_reconcile(serving):
    async def run() -> None:
        tell(serving, want(0))
        held = (await lease(serving, "p"))["lease"]
        serving.ledger.stored("p", held["want"], held["lease"], 10, "c")
        other, idle = await begin(lease(serving, "other")), await begin(lease(serving, "p"))
        serving.ledger.consumed(held["want"], held["lease"], removed=False)
        serving._spread_news()
        assert (await ended(idle))[0]["reconcile"] is True and not other.done()
        other.cancel()

    asyncio.run(run())


def test_nothing_is_kept_of_callers_who_have_left():
    async def run() -> None:
        polls = Polls()
        assert await polls.sleep(("a", "b"), 0.001) is False
        sleeper = await begin(polls.sleep(("a", "b"), LONG))
        polls.wake_one("b")
        polls.wake("a")
        assert await sleeper is True
        cancelled = await begin(polls.sleep(("c",), LONG))
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        assert not polls._sleepers

    asyncio.run(run())
