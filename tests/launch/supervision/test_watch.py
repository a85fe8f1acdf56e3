"""Who is taken to hang, and who is not: every false alarm costs a run some work, and three of them end it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from launch.supervision import watch
from launch.supervision.processes import Crew, Role
from launch.supervision.watch import Watch
from trainer.config import load_config

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
# A trainer with one rank, as torchrun starts it: a child in a session of its own.
TRAINER = [sys.executable, "-c", f"import subprocess; subprocess.Popen({SLEEP!r}, start_new_session=True).wait()"]


class World:
    """A crew of real (idle) processes; what they say, and what time it is, is the test's."""

    def __init__(self, logs: Path):
        self.crew = Crew(logs, max_restarts=3)
        self.master = self.crew.start_helper(Role("mooncake", SLEEP, server=True))
        self.ledger = self.crew.start_helper(Role("ledger", SLEEP, server=True))
        self.producer = self.crew.start_helper(Role("producer-0", SLEEP))
        self.trainer = self.crew.start_trainer(Role("trainer", TRAINER))
        self.rank = self._rank()
        self.now = self.trainer.started
        self.instance, self.heard, self.master_answers = "one", {}, True
        self.busy = True  # whether whoever loads uses the processor
        self.used = 0.0
        config = load_config("ci_eagle3", ["cluster.hang_seconds=10", "source.lease_seconds=20", "cluster.ranks=1"])
        self.watch = Watch(
            self.crew, config, self._status, lambda: self.master_answers, clock=lambda: self.now, cpu=self._cpu
        )

    def _cpu(self, pids: list[int]) -> float:
        self.asked_of = pids
        self.used += self.busy
        return self.used

    def _rank(self) -> int:
        children = Path(f"/proc/{self.trainer.process.pid}/task/{self.trainer.process.pid}/children")
        while not (found := children.read_text().split()):
            pass
        return int(found[0])

    def _status(self) -> dict[str, Any] | None:
        if self.instance is None:
            return None
        pids = {"producer": self.producer.process.pid, "rank": self.rank}
        speakers = {name: [] for name in pids}
        for name, when in self.heard.items():
            speakers[name].append({"name": "producer-0-3f9a61", "pid": pids[name], "rank": 1, "seen": self.now - when})
        return {"instance": self.instance, "producers": speakers["producer"], "ranks": speakers["rank"]}

    def pass_time(self, seconds: float, *speaking: str) -> list[str]:
        """Second by second, with those who speak; returns who is found to hang at the end of it."""
        found: dict[str, str] = {}
        for _ in range(int(seconds)):
            self.now += 1
            self.heard.update({name: self.now for name in speaking})
            found.update({child.role.name: why for child, _, why in self.watch.look()})
        return [f"{name}: {why}" for name, why in found.items()]


@pytest.fixture
def world(tmp_path: Path):
    world = World(tmp_path)
    yield world
    world.crew.stop(grace=0)


def test_nobody_who_speaks_or_loads_is_accused(world: World) -> None:
    assert world.pass_time(100) == []  # ranks and producers load for as long as they need
    assert world.pass_time(100, "producer", "rank") == []


def test_who_stops_loading_is_noticed(world: World) -> None:
    world.pass_time(100)
    world.busy = False
    assert world.pass_time(10) == []
    assert world.pass_time(1, "producer") == ["trainer: it had not begun and did nothing for 11 s"]
    assert world.rank in world.asked_of and world.trainer.process.pid not in world.asked_of


def test_torchrun_itself_counts_until_it_has_a_rank(world: World, monkeypatch) -> None:
    monkeypatch.setattr(watch, "descendants", lambda pid: [])  # it still imports
    assert world.pass_time(100) == []
    assert world.trainer.process.pid in world.asked_of
    world.busy = False
    assert "trainer: it had not begun and did nothing for 11 s" in world.pass_time(11)


def test_a_rank_that_stops_loading_beside_one_that_trains(world: World) -> None:
    world.watch._world_size = 2
    world.busy = False
    assert world.pass_time(11, "producer", "rank") == []
    assert world.pass_time(1, "producer", "rank") == ["trainer: it had not begun and did nothing for 11 s"]
    assert world.rank not in world.asked_of


def test_a_silent_rank(world: World) -> None:
    world.pass_time(5, "producer", "rank")
    assert world.pass_time(10, "producer") == []
    assert world.pass_time(1, "producer") == ["trainer: rank 1 was silent for 11 s"]


def test_a_rank_of_an_earlier_life_is_not_missed(world: World) -> None:
    world.pass_time(5, "producer", "rank")
    world.trainer.process.kill()
    world.trainer.process.wait()
    world.crew.revive(world.trainer)
    world.trainer.started = world.now
    world.rank = world._rank()
    world.heard.pop("rank")
    assert world.pass_time(60, "producer") == []  # it loads
    assert world.pass_time(5, "producer", "rank") == []
    assert world.pass_time(11, "producer") == ["trainer: rank 1 was silent for 11 s"]


def test_on_another_machine_who_speaks_is_watched_and_who_loads_is_not(world: World) -> None:
    world.trainer.role.elsewhere = world.producer.role.elsewhere = True
    world.busy = False
    assert world.pass_time(100) == []
    assert world.pass_time(5, "producer", "rank") == []
    assert world.pass_time(31) == [
        "trainer: rank 1 was silent for 31 s", "producer-0: it was silent for 31 s",
    ]  # fmt: skip


def test_an_answer_that_took_its_time_does_not_tell_of_a_new_life(world: World) -> None:
    """The rank spoke, died and was started again while the question was under way."""
    world.pass_time(5, "producer", "rank")
    status = world.watch._ask_ledger

    def slowly() -> dict[str, Any] | None:
        world.now += 3
        world.trainer.started = world.now - 1.5
        world.heard["rank"] = world.now - 2
        return status()

    world.watch._ask_ledger = slowly
    world.watch.look()
    world.watch._ask_ledger = status
    assert world.pass_time(60, "producer") == []  # it loads


def test_a_producer_may_be_silent_while_it_computes(world: World) -> None:
    world.pass_time(5, "producer", "rank")
    assert world.pass_time(30, "rank") == []
    assert world.pass_time(1, "rank") == ["producer-0: it was silent for 31 s"]


def test_servers_that_do_not_answer(world: World) -> None:
    world.pass_time(5, "producer", "rank")
    world.master_answers = False
    assert world.pass_time(10, "producer", "rank") == []
    assert world.pass_time(1, "producer", "rank") == ["mooncake: it was silent for 11 s"]
    world.master_answers, world.instance = True, None
    assert world.pass_time(11) == ["ledger: it was silent for 11 s"]


def test_a_server_that_stops_before_its_first_answer(world: World) -> None:
    """Those who find no ledger wait for it, and do nothing: they are not to blame."""
    world.instance, world.master_answers, world.busy = None, False, False
    assert world.pass_time(11) == []
    assert world.pass_time(1) == [
        "mooncake: it had not begun and did nothing for 11 s",
        "ledger: it had not begun and did nothing for 11 s",
    ]


def test_while_the_ledger_is_away_only_it_is_accused_and_a_new_one_knows_nobody(world: World) -> None:
    world.pass_time(5, "producer", "rank")
    world.instance = None
    assert [line.partition(":")[0] for line in world.pass_time(60)] == ["ledger"]
    world.instance, world.heard = "two", {}
    assert world.pass_time(11) == []  # from when it first answers
    # Who spoke to the old one and is not heard by the new one hangs all the same.
    assert world.pass_time(1) == ["trainer: rank 1 was silent for 11 s"]
    assert "producer-0: it was silent for 31 s" in world.pass_time(20)


def test_nobody_is_blamed_for_the_time_in_which_the_machine_slept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run` finds that it slept longer than it wanted to, and starts counting anew."""
    world.pass_time(5, "producer", "rank")

    class Stop:
        """An event that is set after some waits; the first one takes as long as it is told to."""

        def __init__(self, first: float, waits: int):
            self.pauses = [first, *[1.0] * waits]

        def wait(self, seconds: float) -> bool:
            world.now += self.pauses.pop(0)
            return not self.pauses

        def is_set(self) -> bool:
            return False

    accused = []
    monkeypatch.setattr(watch, "end_hung", lambda child, process, why: accused.append(child.role.name))
    world.watch.run(Stop(3600, 9))
    assert accused == []
    world.watch.run(Stop(1, 9))
    assert set(accused) == {"trainer"}
