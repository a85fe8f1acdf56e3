"""Where the actors of a simulated run meet: the ledger, the store, and what they know of each other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import simpy

from data_pipelines.stream.ledger import Ledger

from .parts import Barrier, Flow, Network, Nic, Servers, Signal, Sleepers, Tally
from .scenario import Scenario

FEATURES = "features"
Steps = Iterator[simpy.Event]


class Shard:
    """A ledger and its event loop."""

    def __init__(self, env: simpy.Environment, scenario: Scenario):
        self.env, self.costs, self._latency = env, scenario.costs, scenario.latency
        self._poll_seconds = scenario.poll_seconds
        self.loop, self.sleepers = Servers(env), Sleepers(env)
        self.ledger = Ledger(
            lease_seconds=scenario.lease_seconds,
            max_attempts=scenario.max_attempts,
            clock=lambda: env.now,
            window_bytes=scenario.window_bytes // scenario.ledgers,
        )
        self.max_used = 0

    def call(self, kind: str, do: Callable[[], Any], *, tokens: int = 0) -> Steps:
        """One request, there and back."""
        costs = self.costs
        yield self.env.timeout(costs.caller + self._latency)
        yield self.loop.serve(costs.ledger[kind] + tokens * costs.ledger_token)
        answer = do()
        self._spread_news()
        yield self.env.timeout(self._latency)
        return answer

    def poll(self, kind: str, do: Callable[[], Any], names: tuple[str, ...], *, tokens: int = 0) -> Steps:
        """A long poll: `server.LedgerServer._until`. tokens: of an answer, if there is one."""
        costs = self.costs
        yield self.env.timeout(costs.caller + self._latency)
        deadline, cost = self.env.now + self._poll_seconds, costs.ledger[kind]
        while True:
            yield self.loop.serve(cost)
            answer = do()
            if answer or self.env.now >= deadline:
                break
            yield from self.sleepers.sleep(names, deadline - self.env.now)
            cost = costs.wake
        if answer and tokens:
            yield self.loop.serve(tokens * costs.ledger_token)
        if answer and kind == "lease":
            self.sleepers.wake(FEATURES, one=True)
        self._spread_news()
        yield self.env.timeout(self._latency)
        return answer

    def _spread_news(self) -> None:
        news, offers = self.ledger.take_news()
        for name in news:
            self.sleepers.wake(name)
        if offers:
            self.sleepers.wake(FEATURES, one=True)
        self.max_used = max(self.max_used, self.ledger.window()["used"])


class Store:
    """Objects in their producers' memory, a master that knows them, and the links between."""

    def __init__(self, env: simpy.Environment, scenario: Scenario):
        s = scenario
        self.env, self.costs, self._latency = env, s.costs, s.latency
        self.master, self.network = Servers(env, s.costs.master_workers), Network(env, s.flow_rate)
        self.producer_nics = [Nic(s.producer_nic) for _ in range(-(-s.producers // s.producers_per_nic))]
        self.rank_nics = [Nic(s.rank_nic) for _ in range(-(-s.ranks // s.ranks_per_nic))]
        self._producer_nic = lambda number: self.producer_nics[number // s.producers_per_nic]
        self._rank_nic = lambda rank: self.rank_nics[rank // s.ranks_per_nic]
        self._objects: dict[str, tuple[int, int]] = {}  # key → producer's number, bytes
        self._flows: dict[int, list[Flow]] = {}

    def put(self, key: str, number: int, size: int) -> Steps:
        """Into the producer's own segment: two requests to the master around a copy."""
        yield from self._ask_master()
        yield self.env.timeout(self.costs.put + size * self.costs.put_byte)
        yield from self._ask_master()
        self._objects[key] = number, size

    def get(self, key: str, rank: int) -> Steps:
        """True when the object has come and was verified."""
        yield from self._ask_master()
        if key not in self._objects:
            return False
        number, size = self._objects[key]
        flow = self.network.send(size, self._producer_nic(number), self._rank_nic(rank))
        flows = self._flows.setdefault(number, [])
        flows.append(flow)
        arrived = yield flow.done
        flows.remove(flow)
        yield self.env.timeout(self.costs.get + size * self.costs.get_byte)
        return arrived

    def remove(self, key: str) -> Steps:
        yield from self._ask_master()
        yield self.env.timeout(self.costs.remove)
        self._objects.pop(key, None)

    def forget(self, number: int) -> None:
        """A producer is gone, with its memory."""
        self._objects = {key: held for key, held in self._objects.items() if held[0] != number}
        self.network.cut(self._producer_nic(number), list(self._flows.get(number, [])))

    def _ask_master(self) -> Steps:
        yield self.env.timeout(2 * self._latency)
        yield self.master.serve(self.costs.master)


class World:
    """What all actors share. history: of each step that is done, and not undone by a restart, the mean seconds for which a
    rank worked on it, and its packs."""

    def __init__(self, scenario: Scenario):
        self.scenario, self.env, self.tally = scenario, simpy.Environment(), Tally()
        self.shards = [Shard(self.env, scenario) for _ in range(scenario.ledgers)]
        self.store = Store(self.env, scenario)
        self.barrier = Barrier(self.env, scenario.ranks)
        self.session = ""
        self.history: list[tuple[float, tuple[int, ...]]] = []
        self.worked = 0.0  # of all ranks, in the present step
        self.taken: list[int] = []  # likewise
        self.stepped, self.finished = Signal(self.env), self.env.event()

    def random(self, *who: Any) -> random.Random:
        """Of one actor: what others draw does not matter to it."""
        return random.Random(f"{self.scenario.seed} {who}")
