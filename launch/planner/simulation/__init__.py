"""A discrete-event simulation of a whole run: producers, links, store, ledger, ranks, checkpoints, failures.

It runs the real ledger (`data_pipelines.stream.ledger.Ledger`, with its leases, window and sessions) on a simulated clock;
ranks and producers make the calls that `sources.py`, `consumer.py`, `loop.py` and `producer.py` make, in their order. What
takes time is in `Costs` and `Scenario`: service times that were measured, and the seconds of a forward and of a step.
"""

from __future__ import annotations

from data_pipelines.errors import UserError

from .actors import Producer, killer, trainer
from .scenario import Result, Scenario
from .world import Steps, World


def simulate(scenario: Scenario, *, skipped: int = 1) -> Result:
    """Run it to its end. skipped: steps before rates and fractions are taken: the pipeline fills.

    Raises UserError when the run would stop, or `max_seconds` were not enough for `skipped` + 1 steps.
    """
    world = World(scenario)
    producers = [Producer(world, number) for number in range(scenario.producers)]
    counted = _Counted(world, producers)
    world.env.process(trainer(world))
    world.env.process(killer(world, producers))
    world.env.run(until=world.finished | world.env.timeout(scenario.max_seconds))
    return counted.result(min(skipped, (scenario.stop_after or scenario.steps) - 1))


class _Counted:
    """The counters of a world when so many steps were done for the first time: what a restart undoes has taken its time."""

    def __init__(self, world: World, producers: list[Producer]):
        self._world, self._producers = world, producers
        self._at = {0: self._look()}
        world.env.process(self._watch())

    def _watch(self) -> Steps:
        while True:
            yield self._world.stepped.wait()
            self._at.setdefault(len(self._world.history), self._look())

    def _look(self) -> tuple[float, ...]:
        for producer in self._producers:
            producer.count()
        world = self._world
        nics = [*world.store.rank_nics, *world.store.producer_nics]
        return (
            world.env.now,
            world.tally.waited,
            world.tally.idle,
            world.tally.lived,
            world.store.master.busy,
            sum(shard.loop.queued for shard in world.shards),
            sum(shard.loop.requests for shard in world.shards),
            *(shard.loop.busy for shard in world.shards),
            *(nic.carried / nic.rate for nic in nics),
        )

    def result(self, skipped: int) -> Result:
        world, s, t = self._world, self._world.scenario, self._world.tally
        if len(world.history) <= skipped:
            raise UserError(f"only {len(world.history)} steps were simulated", fix="raise max_seconds")
        pairs = zip(self._at[skipped], self._look())
        seconds, waited, idle, lived, master, queued, requests, *busy = (after - before for before, after in pairs)
        loops, nics = busy[: s.ledgers], busy[s.ledgers :]
        ranks = len(world.store.rank_nics)
        steps = len(world.history) - skipped
        return Result(
            seconds=seconds,
            steps=len(world.history),
            steps_per_second=steps / seconds,
            tokens_per_second=steps * s.ranks * s.packs_per_rank * s.tokens / seconds,
            lost_fraction=max(0.0, 1 - sum(worked for worked, _ in world.history[skipped:]) / seconds),
            wait_fraction=waited / s.ranks / seconds,
            idle_fraction=idle / lived,
            ledger=max(loops) / seconds,
            ledger_queue=queued / requests,
            requests_per_second=requests / seconds,
            master=master / seconds / s.costs.master_workers,
            rank_nic=max(nics[:ranks]) / seconds,
            producer_nic=max(nics[ranks:]) / seconds,
            window=max(shard.max_used for shard in world.shards) * s.ledgers / (s.window_bytes or float("inf")),
            packs_computed=t.computed,
            packs_lost=t.lost,
            packs_refused=t.refused,
            producers_died=t.died,
            trainer_restarts=t.restarts,
            trained=tuple(packs for _, packs in world.history),
        )
