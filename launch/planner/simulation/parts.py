"""What the simulation is made of: queues, links, and ranks that wait for each other."""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from math import log, sqrt

import simpy


class Servers:
    """Equal workers with one queue, first come, first served: the ledger's event loop (one), the store's master."""

    def __init__(self, env: simpy.Environment, workers: int = 1):
        self.env, self.workers = env, workers
        self.busy = self.queued = 0.0  # seconds of all workers; of all requests in the queue
        self.requests = 0
        self._free = [0.0] * workers

    def serve(self, seconds: float) -> simpy.Event:
        """Happens when a request that is made now, and takes so long, is done."""
        now = self.env.now
        begins = max(now, heapq.heappop(self._free))
        heapq.heappush(self._free, begins + seconds)
        self.busy += seconds
        self.queued += begins - now
        self.requests += 1
        return self.env.timeout(begins + seconds - now)


class Nic:
    """One end of links. rate: bytes per second."""

    def __init__(self, rate: float):
        self.rate, self.carried = rate, 0.0
        self.flows: dict[Flow, None] = {}


@dataclass(eq=False)
class Flow:
    """Bytes on their way between two NICs. done: with True when all have arrived, with False when one end is gone."""

    left: float
    ends: tuple[Nic, Nic]
    done: simpy.Event
    rate: float = 0.0
    since: float = 0.0
    timer: int = 0


class Network:
    """Transfers share each NIC equally, and take the smaller of the shares at their two ends; `flow_rate` at most.

    (Max-min fairness would hand on what a flow cannot use; with the few flows that a NIC has here, the difference is small.)
    """

    def __init__(self, env: simpy.Environment, flow_rate: float = float("inf")):
        self.env, self._flow_rate = env, flow_rate

    def send(self, size: float, source: Nic, target: Nic) -> Flow:
        flow = Flow(size, (source, target), self.env.event(), since=self.env.now)
        for nic in flow.ends:
            nic.flows[flow] = None
            nic.carried += size
        self._share(flow)
        return flow

    def cut(self, nic: Nic, flows: list[Flow]) -> None:
        """These flows over `nic` end unfinished."""
        for flow in [flow for flow in flows if flow in nic.flows]:
            self._end(flow, arrived=False)

    def _share(self, changed: Flow) -> None:
        for flow in {**changed.ends[0].flows, **changed.ends[1].flows}:
            flow.left -= flow.rate * (self.env.now - flow.since)
            flow.rate = min(self._flow_rate, *(nic.rate / len(nic.flows) for nic in flow.ends))
            flow.since = self.env.now
            flow.timer += 1
            number = flow.timer
            arrival = self.env.timeout(max(flow.left, 0.0) / flow.rate)
            arrival.callbacks.append(lambda _, flow=flow, number=number: self._arrived(flow, number))

    def _arrived(self, flow: Flow, number: int) -> None:
        if number == flow.timer:
            self._end(flow, arrived=True)

    def _end(self, flow: Flow, *, arrived: bool) -> None:
        flow.timer += 1
        for nic in flow.ends:
            del nic.flows[flow]
        self._share(flow)
        flow.done.succeed(arrived)


class Signal:
    """A condition: whoever waits is woken by the next `fire`."""

    def __init__(self, env: simpy.Environment):
        self._env, self._event = env, env.event()

    def wait(self) -> simpy.Event:
        return self._event

    def fire(self) -> None:
        event, self._event = self._event, self._env.event()
        event.succeed()


class Barrier:
    """A collective: nobody passes before all `size` are there."""

    def __init__(self, env: simpy.Environment, size: int):
        self._env, self._size, self._there, self._event = env, size, 0, env.event()

    def wait(self) -> simpy.Event:
        event = self._event
        self._there += 1
        if self._there == self._size:
            self._there, self._event = 0, self._env.event()
            event.succeed()
        return event


class Sleepers:
    """`data_pipelines.stream.polls.Polls` on the simulation's clock."""

    def __init__(self, env: simpy.Environment):
        self._env = env
        self._by_name: dict[str, OrderedDict[simpy.Event, None]] = {}

    def sleep(self, names: tuple[str, ...], seconds: float) -> Iterator[simpy.Event]:
        sleeper = self._env.event()
        self._env.timeout(seconds).callbacks.append(lambda _: sleeper.triggered or sleeper.succeed())
        for name in names:
            self._by_name.setdefault(name, OrderedDict())[sleeper] = None
        try:
            yield sleeper
        finally:
            for name in names:
                others = self._by_name[name]
                del others[sleeper]
                if not others:
                    del self._by_name[name]

    def wake(self, name: str, *, one: bool = False) -> None:
        for sleeper in self._by_name.get(name, ()):
            if not sleeper.triggered:
                sleeper.succeed()
                if one:
                    return


@dataclass(frozen=True)
class Spread:
    """Seconds that something takes: log-normal, with the standard deviation `cv` × mean; always `mean` with cv = 0."""

    mean: float
    cv: float = 0.0

    def draw(self, random_: random.Random) -> float:
        if not self.cv or not self.mean:
            return self.mean
        variance = log(1 + self.cv**2)
        return random_.lognormvariate(log(self.mean) - variance / 2, sqrt(variance))


@dataclass
class Tally:
    """What happened, beside the steps. waited: seconds of all ranks together, for packs. Of all producers together: idle,
    waiting for a lease; lived."""

    waited: float = 0.0
    idle: float = 0.0
    lived: float = 0.0
    computed: int = 0
    refused: int = 0
    lost: int = 0
    died: int = 0
    restarts: int = 0
