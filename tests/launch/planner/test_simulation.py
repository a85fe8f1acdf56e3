"""The simulation where the answer is known: conservation, limits, closed forms, order."""

from __future__ import annotations

import dataclasses
import random

import pytest
import simpy

from data_pipelines.errors import UserError
from launch.planner.simulation import simulate
from launch.planner.simulation.parts import Barrier, Network, Nic, Servers, Spread
from launch.planner.simulation.scenario import CALLS, Costs, Scenario

FREE = Costs(
    ledger=dict.fromkeys(CALLS, 0.0), ledger_token=0.0, wake=0.0, caller=0.0, master=0.0, put=0.0, get=0.0, remove=0.0,
    put_byte=0.0, get_byte=0.0,
)  # fmt: skip
RUN = Scenario(
    ranks=4, producers=4, steps=60, packs_per_rank=2, tokens=1000, pack_bytes=10**6, compute=Spread(0.1), step=Spread(0.1),
    latency=0.0, costs=FREE,
)  # fmt: skip
MISFORTUNE = dataclasses.replace(
    RUN, compute=Spread(0.1, 0.5), step=Spread(0.02, 0.3), costs=Costs(), latency=1e-4, window_bytes=12 * 10**6,
    producer_mtbf=15.0, producer_restart=2.0, lease_seconds=1.5, max_attempts=9, rank_mtbf=20.0, trainer_restart=3.0,
    checkpoint_every=7, checkpoint=0.1,
)  # fmt: skip


def changed(scenario: Scenario, **values) -> Scenario:
    return dataclasses.replace(scenario, **values)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_dies_every_pack_is_trained_once_and_in_its_step(seed):
    result = simulate(changed(MISFORTUNE, seed=seed))
    assert result.producers_died and result.trainer_restarts and result.steps == MISFORTUNE.steps
    size = RUN.ranks * RUN.packs_per_rank
    assert [sorted(step) for step in result.trained] == [list(range(s * size, (s + 1) * size)) for s in range(60)]
    assert result.packs_computed >= 60 * size and result.window <= 1.0


def test_what_was_done_since_the_last_checkpoint_is_done_again():
    storm = changed(RUN, rank_mtbf=20.0, trainer_restart=1.0, producers=16)
    often, seldom = (simulate(changed(storm, checkpoint_every=every)) for every in (1, 20))
    assert often.trainer_restarts and often.packs_computed < seldom.packs_computed
    assert [sorted(step) for step in seldom.trained] == [list(range(8 * s, 8 * s + 8)) for s in range(60)]


def test_what_deaths_of_ranks_cost_is_in_the_rates():
    """Without checkpoints each one undoes everything, and the whole run's time has to hold all lives."""
    scenario = changed(RUN, rank_mtbf=20.0, trainer_restart=10.0)
    result, calm = simulate(scenario, skipped=5), simulate(RUN, skipped=5)
    assert result.trainer_restarts >= 2 and result.steps == calm.steps
    assert result.seconds > calm.seconds + 10.0 * result.trainer_restarts
    assert result.lost_fraction == pytest.approx(1 - 0.2 * 55 / result.seconds)


def test_the_beginning_of_a_run_is_the_same_however_long_it_is():
    """At its end nothing is wanted any more, and stations stand idle: rates are taken before."""
    whole, part = simulate(MISFORTUNE), simulate(changed(MISFORTUNE, stop_after=30))
    assert part.steps == 30 and part.trained == whole.trained[:30]


def test_the_seed_decides_everything():
    once, again = simulate(MISFORTUNE), simulate(MISFORTUNE)
    other = simulate(changed(MISFORTUNE, seed=1))
    assert once == again and other.seconds != once.seconds


def test_an_actor_that_is_not_disturbed_draws_the_same_whatever_others_do():
    calm = changed(MISFORTUNE, producer_mtbf=0.0, rank_mtbf=0.0, producers=1, costs=FREE, window_bytes=0)
    slow_trainer = changed(calm, step=Spread(0.03, 0.3))
    assert simulate(calm).seconds == pytest.approx(simulate(slow_trainer).seconds, rel=0.01)


def test_bound_by_producers():
    result = simulate(changed(RUN, compute=Spread(0.4)))
    assert result.steps_per_second == pytest.approx(4 / 0.4 / 8, rel=0.01)
    assert result.idle_fraction < 0.01 and result.wait_fraction == pytest.approx(1 - 0.2 / 0.8, rel=0.05)
    assert result.lost_fraction == pytest.approx(1 - 0.2 / 0.8, rel=0.01)


def test_who_is_held_up_by_another_ranks_late_pack_loses_time_too():
    """Seven packs come at once and the eighth late: one rank waits for it, at the barrier all do."""
    result = simulate(changed(RUN, producers=2, compute=Spread(0.2), ranks=8, packs_per_rank=1))
    assert result.steps_per_second == pytest.approx(2 / 0.2 / 8, rel=0.02)
    assert (
        result.lost_fraction == pytest.approx(1 - 0.1 / 0.8, rel=0.02) and result.wait_fraction < result.lost_fraction
    )


def test_bound_by_ranks():
    result = simulate(changed(RUN, producers=16, sync=0.05, checkpoint=0.5, checkpoint_every=10), skipped=10)
    assert result.steps_per_second == pytest.approx(1 / (0.25 + 0.05), rel=0.01)
    assert result.wait_fraction < 0.01
    assert result.idle_fraction == pytest.approx(1 - 8 * 0.1 * result.steps_per_second / 16, abs=0.01)


def test_bound_by_the_slowest_rank():
    """The mean of the largest of four exponential-like draws is above their mean: synchronous steps wait."""
    even, uneven = (simulate(changed(RUN, producers=16, step=Spread(0.1, cv))) for cv in (0.0, 0.5))
    assert uneven.steps_per_second < 0.85 * even.steps_per_second
    assert even.lost_fraction < 0.01 < 0.1 < uneven.lost_fraction and uneven.wait_fraction < 0.01


def test_bound_by_the_ledger():
    costs = dataclasses.replace(FREE, ledger=dict.fromkeys(CALLS, 0.01))
    scenario = changed(RUN, compute=Spread(0.001), step=Spread(0.001), producers=8, costs=costs, poll_seconds=60.0)
    result = simulate(scenario)
    # Five calls a pack, and no long poll that has to be looked at for more than the wake, which is free.
    assert result.tokens_per_second / RUN.tokens == pytest.approx(1 / 0.05, rel=0.05)
    assert result.ledger == pytest.approx(1.0, abs=0.02) and result.ledger_queue > 0.01
    sharded = simulate(changed(scenario, ledgers=4))
    assert sharded.tokens_per_second == pytest.approx(4 * result.tokens_per_second, rel=0.05)


def test_bound_by_a_link():
    ranks_share = simulate(changed(RUN, step=Spread(0.0), compute=Spread(0.0), rank_nic=10e6, ranks_per_nic=2))
    assert ranks_share.tokens_per_second / RUN.tokens == pytest.approx(2 * 10e6 / 1e6, rel=0.01)
    assert ranks_share.rank_nic == pytest.approx(1.0, abs=0.01)
    producers_share = simulate(
        changed(RUN, step=Spread(0.0), compute=Spread(0.0), producer_nic=10e6, producers_per_nic=4)
    )
    assert producers_share.tokens_per_second / RUN.tokens == pytest.approx(10e6 / 1e6, rel=0.01)


def test_bound_by_the_window():
    """One pack at a time in the store: they are computed one after the other, whoever computes."""
    result = simulate(changed(RUN, window_bytes=10**6, step=Spread(0.0)))
    assert result.tokens_per_second / RUN.tokens == pytest.approx(1 / 0.1, rel=0.01)
    assert result.window == 1.0


def test_a_killed_producers_pack_comes_when_its_lease_has_ended():
    """One rank, one pack a step: the pack in hand at 2.55 s is leased again when 5 s are over, on the next look (≤ 2 s)."""
    scenario = changed(
        RUN,
        ranks=1,
        packs_per_rank=1,
        producers=2,
        prefetch=2,
        kills=((2.55, 0),),
        producer_restart=1e5,
        lease_seconds=5.0,
    )
    calm, killed = simulate(changed(scenario, kills=())), simulate(scenario)
    assert killed.packs_computed == 60 and killed.packs_lost <= 1 and killed.producers_died == 1
    assert 4.9 < killed.seconds - calm.seconds < 7.2


def test_objects_die_with_their_producer_and_are_computed_again():
    """Slow ranks let them pile up; the read that is under way breaks off, the others find nothing."""
    scenario = changed(
        RUN,
        ranks=1,
        packs_per_rank=1,
        producers=1,
        step=Spread(0.5),
        rank_nic=1e6,
        kills=((2.0, 0),),
        producer_restart=1.0,
    )
    result = simulate(scenario)
    assert result.packs_lost >= 1 and result.packs_computed == 60 + result.packs_lost


def test_more_of_anything_is_never_slower():
    base = changed(RUN, compute=Spread(0.4), costs=Costs(), latency=1e-4, window_bytes=4 * 10**6, rank_nic=50e6)
    rate = simulate(base).steps_per_second
    better = {
        "producers": 8, "window_bytes": 8 * 10**6, "prefetch": 8, "rank_nic": 500e6, "compute": Spread(0.2),
        "costs": FREE,
    }  # fmt: skip
    for name, value in better.items():
        assert simulate(changed(base, **{name: value})).steps_per_second >= 0.999 * rate, name


def test_a_run_that_the_real_one_would_stop_stops():
    with pytest.raises(UserError, match="would stop"):
        simulate(changed(RUN, compute=Spread(3.0), lease_seconds=1.0, max_attempts=2))
    with pytest.raises(UserError, match="max_seconds"):
        simulate(changed(RUN, max_seconds=0.05))
    with pytest.raises(UserError, match="window"):
        changed(RUN, window_bytes=10**5)


def test_a_queue_waits_as_the_pollaczek_khinchine_formula_says():
    """M/D/1: ρs / 2(1 − ρ)."""
    env, draw, service, load = simpy.Environment(), random.Random(0), 1.0, 0.7
    loop = Servers(env)

    def arrivals():
        for _ in range(60_000):
            yield env.timeout(draw.expovariate(load / service))
            loop.serve(service)

    env.process(arrivals())
    env.run()
    assert loop.queued / loop.requests == pytest.approx(load * service / (2 * (1 - load)), rel=0.03)


def test_links_are_shared():
    """Two packs of 10 into one NIC of 1: the second starts at 5. By hand: 5 alone, 10 together, 5 alone."""
    env = simpy.Environment()
    network, narrow, wide = Network(env), Nic(1.0), Nic(100.0)
    arrived = {}

    def send(name, begin, size):
        yield env.timeout(begin)
        whole = yield network.send(size, wide, narrow).done
        arrived[name] = env.now, whole

    env.process(send("first", 0, 10))
    env.process(send("second", 5, 10))
    env.run()
    assert arrived == {"first": (pytest.approx(15), True), "second": (pytest.approx(20), True)}


def test_a_collective_needs_all():
    env = simpy.Environment()
    barrier, passed = Barrier(env, 3), []

    def rank(number):
        for turn in range(3):
            yield env.timeout(number)
            yield barrier.wait()
            passed.append((turn, env.now))

    for number in range(3):
        env.process(rank(number))
    env.run()
    assert passed == [(0, 2)] * 3 + [(1, 4)] * 3 + [(2, 6)] * 3


def test_a_spread_has_the_mean_that_it_is_given():
    draw = random.Random(1)
    drawn = [Spread(2.0, 0.5).draw(draw) for _ in range(20_000)]
    mean = sum(drawn) / len(drawn)
    assert mean == pytest.approx(2.0, rel=0.02)
    assert (sum((x - mean) ** 2 for x in drawn) / len(drawn)) ** 0.5 == pytest.approx(1.0, rel=0.05)
