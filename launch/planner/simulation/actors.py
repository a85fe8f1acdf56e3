"""Who acts in a simulated run: producers, the trainer with its ranks, and misfortune."""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import count

import simpy

from data_pipelines.errors import UserError
from data_pipelines.stream.messages import About
from data_pipelines.stream.wants import FAILED, STORED, UNKNOWN, Want, object_key

from .parts import Barrier, Signal
from .world import FEATURES, Steps, World

_RECONCILE_EVERY = 64  # stored packs, as in producer.py
_WANTS_PER_REQUEST = 16  # as in client.py


class Producer:
    """`data_pipelines.stream.producer.Producer`: lease, compute, put, stored; again after a death, under another name."""

    def __init__(self, world: World, number: int):
        self.number, self.alive = number, False
        self._world, self._lives = world, count()
        self._shard = world.shards[number * len(world.shards) // world.scenario.producers]
        self._random = world.random("producer", number)
        self._held: list[str] = []
        self._asked_since: float | None = None
        self._counted = 0.0
        self.process = world.env.process(self._live())

    def kill(self) -> None:
        self.process.interrupt()

    def count(self) -> None:
        """How it has spent its time, up to now."""
        now = self._world.env.now
        if self.alive:
            self._world.tally.lived += now - self._counted
        if self._asked_since is not None:
            self._world.tally.idle += now - self._asked_since
            self._asked_since = now
        self._counted = now

    def _live(self) -> Steps:
        while True:
            self.count()
            self.alive, self._held = True, []
            try:
                yield from self._serve(f"producer-{self.number}-{next(self._lives)}")
            except simpy.Interrupt:
                self.count()
                self.alive, self._asked_since = False, None
                self._world.tally.died += 1
                self._world.store.forget(self.number)
                yield self._world.env.timeout(self._world.scenario.producer_restart)

    def _serve(self, name: str) -> Steps:
        world, shard, ledger = self._world, self._shard, self._shard.ledger
        scenario, tally = world.scenario, world.tally
        while True:
            self._asked_since = world.env.now
            lease = yield from shard.poll(
                "lease",
                lambda: ledger.lease(name, FEATURES, About()) or ledger.untidy(name),
                (FEATURES, name),
                tokens=scenario.tokens,
            )
            self.count()
            self._asked_since = None
            if ledger.untidy(name):
                yield from self._reconcile(name)
            if not lease or lease is True:
                continue
            seconds = scenario.compute.draw(self._random)
            yield world.env.timeout(seconds)
            tally.computed += 1
            key = object_key(lease.pack, lease.lease)
            self._held.append(key)
            yield from world.store.put(key, self.number, scenario.pack_bytes)
            stored = partial(ledger.stored, name, lease.want, lease.lease, scenario.pack_bytes, "")
            accepted = yield from shard.call("stored", stored)
            if not accepted:
                tally.refused += 1
                yield from self._drop([key])
            elif len(self._held) >= _RECONCILE_EVERY:
                yield from self._reconcile(name)

    def _reconcile(self, name: str) -> Steps:
        shard = self._shard
        needed = yield from shard.call("reconcile", partial(shard.ledger.reconcile, name, self._held))
        superfluous = set(self._held).difference(needed)
        if superfluous:
            yield from self._drop(sorted(superfluous))
            yield from shard.call("reconcile", partial(shard.ledger.reconcile, name, self._held))

    def _drop(self, keys: list[str]) -> Steps:
        for key in keys:
            yield from self._world.store.remove(key)
            self._held.remove(key)


class Rank:
    """A rank's prefetching thread (`Prefetcher` over `StreamSource`) and its loop."""

    def __init__(self, world: World, rank: int, start: int):
        self._world, self.rank = world, rank
        scenario = world.scenario
        self._shard = world.shards[rank * len(world.shards) // scenario.ranks]
        first, last = start * scenario.packs_per_rank, scenario.steps * scenario.packs_per_rank
        self._items = iter(range(first * scenario.ranks + rank, last * scenario.ranks, scenario.ranks))
        self._wanted: deque[int] = deque()
        self._fetched: deque[int] = deque()
        self._changed = Signal(world.env)
        self._random = world.random("rank", rank, start)
        self.processes = [world.env.process(self._prefetch()), world.env.process(self._loop(start))]

    def _want(self, index: int) -> Want:
        s = self._world.scenario
        return Want(self._world.session, index, f"pack{index}", FEATURES, s.pack_bytes, b"", [s.tokens])

    def _prefetch(self) -> Steps:
        depth = self._world.scenario.prefetch
        try:
            while True:
                while not self._wanted and len(self._fetched) >= depth:
                    yield self._changed.wait()
                room = depth - len(self._fetched) - len(self._wanted)
                new = [index for _, index in zip(range(room), self._items)]
                yield from self._announce(new)
                self._wanted.extend(new)
                if not self._wanted:
                    return
                yield from self._fetch(self._wanted[0])
                self._fetched.append(self._wanted.popleft())
                self._changed.fire()
        except simpy.Interrupt:
            pass

    def _announce(self, indices: list[int]) -> Steps:
        shard, tokens = self._shard, self._world.scenario.tokens
        wants = [self._want(index) for index in indices]
        for start in range(0, len(wants), _WANTS_PER_REQUEST):
            part = wants[start : start + _WANTS_PER_REQUEST]
            yield from shard.call("want", partial(shard.ledger.want, part), tokens=tokens * len(part))

    def _fetch(self, index: int) -> Steps:
        world, shard, ledger = self._world, self._shard, self._shard.ledger
        want = self._want(index).id

        def look():
            location = ledger.locate(want)
            return location if location.state in (STORED, FAILED, UNKNOWN) else None

        while True:
            location = yield from shard.poll("locate", look, (want,))
            if location is None:
                continue
            if location.state != STORED:
                raise UserError(f"pack {index} is {location.state}, the run would stop: {location.reasons}")
            arrived = yield from world.store.get(location.key, self.rank)
            yield from world.store.remove(location.key)
            if arrived:
                yield from shard.call("consumed", partial(ledger.consumed, want, location.lease))
                return
            world.tally.lost += 1
            yield from shard.call("lost", partial(ledger.lost, want, location.lease, "it is gone", removed=True))

    def _loop(self, start: int) -> Steps:
        world, scenario = self._world, self._world.scenario
        try:
            for step in range(start, scenario.steps):
                for _ in range(scenario.packs_per_rank):
                    asked = world.env.now
                    while not self._fetched:
                        yield self._changed.wait()
                    world.tally.waited += world.env.now - asked
                    world.taken.append(self._fetched.popleft())
                    self._changed.fire()
                yield world.barrier.wait()
                seconds = sum(scenario.step.draw(self._random) for _ in range(scenario.packs_per_rank))
                world.worked += seconds
                yield world.env.timeout(seconds)
                yield world.barrier.wait()
                if self.rank == 0:
                    worked, taken = world.worked / scenario.ranks + scenario.sync, tuple(world.taken)
                    world.worked, world.taken = 0.0, []
                yield world.env.timeout(scenario.sync)
                if self.rank == 0:
                    world.history.append((worked, taken))
                    world.stepped.fire()
                    if step + 1 == (scenario.stop_after or scenario.steps):
                        world.finished.succeed()
                if scenario.checkpoint_every and (step + 1) % scenario.checkpoint_every == 0:
                    yield world.env.timeout(scenario.checkpoint)
        except simpy.Interrupt:
            pass


def trainer(world: World) -> Steps:
    """All ranks; when one dies, all of them again from the newest checkpoint."""
    scenario, env = world.scenario, world.env
    draw = world.random("ranks")
    for life in count():
        start = len(world.history)
        world.session, world.barrier = f"session{life}", Barrier(env, scenario.ranks)
        world.worked, world.taken = 0.0, []
        ranks = [Rank(world, rank, start) for rank in range(scenario.ranks)]
        death = (
            env.timeout(draw.expovariate(scenario.ranks / scenario.rank_mtbf)) if scenario.rank_mtbf else env.event()
        )
        yield world.finished | death
        if world.finished.triggered:
            return
        world.tally.restarts += 1
        for process in (process for rank in ranks for process in rank.processes):
            if process.is_alive:
                process.interrupt()
        every = scenario.checkpoint_every
        del world.history[len(world.history) // every * every if every else 0 :]
        yield env.timeout(scenario.trainer_restart)


def killer(world: World, producers: list[Producer]) -> Steps:
    """Producers die at the times that the scenario names, and at random."""
    scenario, env = world.scenario, world.env

    def at(seconds: float, number: int) -> Steps:
        yield env.timeout(seconds)
        if producers[number].alive:
            producers[number].kill()

    for seconds, number in scenario.kills:
        env.process(at(seconds, number))
    draw = world.random("killer")
    while scenario.producer_mtbf:
        yield env.timeout(draw.expovariate(scenario.producers / scenario.producer_mtbf))
        victim = producers[draw.randrange(scenario.producers)]
        if victim.alive:
            victim.kill()
    yield env.timeout(0)
