"""`draftsmith simulate <recipe> [key=value …]`: the run of a plan, step by step, with queues, failures and chance."""

from __future__ import annotations

import argparse
import json
import math

from data_pipelines.errors import UserError

from .. import hardware as machines
from ..command import read_asked
from ..job import WINDOW_SHARE, Job, make_job
from . import simulate
from .parts import Spread
from .scenario import Result, Scenario

COMPUTE_SPREAD = 0.1  # standard deviation of a forward, in means: packs are filled to different degrees. A guess
SKIPPED = 4  # steps in which the pipeline fills
_HOUR = 3600.0


def command(arguments: argparse.Namespace) -> None:
    _check(arguments)
    scenario = scenario_of(
        make_job(*read_asked(arguments)),
        steps=arguments.steps,
        ledgers=arguments.ledgers,
        producer_mtbf=arguments.producer_mtbf * _HOUR,
        rank_mtbf=arguments.rank_mtbf * _HOUR,
        seed=arguments.seed,
    )
    result = simulate(scenario, skipped=SKIPPED)
    if arguments.json:
        print(json.dumps(result.numbers(), indent=2))
        return
    for name, value in rows(scenario, result):
        print(f"{name:<44} {value:>12}")


def _check(arguments: argparse.Namespace) -> None:
    """Raises UserError for a number that means nothing."""
    if arguments.steps < 1:
        raise UserError(f"--steps {arguments.steps}; it must be at least 1")
    for flag in ("producer_mtbf", "rank_mtbf"):
        hours = getattr(arguments, flag)
        if not 0 <= hours < math.inf:
            raise UserError(f"--{flag.replace('_', '-')} {hours:g}; it must be hours", fix="0 if none ever dies")


def scenario_of(job: Job, *, steps: int, **more) -> Scenario:
    """A run of so many steps, with the plan's seconds and bytes. more: other fields of a Scenario.

    Raises UserError for a run without a stream, and for ranks that die in one which ends before its first checkpoint: each
    death would undo all of it, in the run itself never more than `checkpoint.every` steps.
    """
    config, hardware = job.config, job.hardware
    ranks, producers = config.cluster.ranks // config.parallel.context, config.cluster.producers
    if not job.streamed:
        raise UserError(f"source={job.source} has no stream to simulate", fix="source=stream")
    if config.global_batch % ranks:
        raise UserError(f"global_batch={config.global_batch} is no multiple of {ranks} ranks", fix="set global_batch")
    every = config.checkpoint.every
    if more.get("rank_mtbf") and not 0 < every <= steps:
        raise UserError(
            f"ranks die, and {steps} steps are simulated with checkpoint.every={every}: no checkpoint is reached",
            fix=f"--steps {10 * every}, or a smaller checkpoint.every" if every else "set checkpoint.every",
        )
    packs = config.global_batch // ranks
    lent = producers * config.store.segment_bytes if config.store.name == "mooncake" else 0
    link = hardware.link_bytes_per_second * machines.LINK_SHARE.value
    return Scenario(
        ranks=ranks,
        producers=producers,
        steps=steps + SKIPPED + config.source.prefetch,  # the last packs are wanted before the last steps
        stop_after=steps + SKIPPED,
        packs_per_rank=packs,
        tokens=round(job.work.tokens),
        pack_bytes=job.pack_bytes,
        compute=Spread(job.producer_seconds, COMPUTE_SPREAD),
        step=Spread(job.batch_seconds),
        sync=packs * (job.rank_seconds(config.cluster.ranks) - job.batch_seconds),
        prefetch=config.source.prefetch,
        window_bytes=config.source.window_bytes or int(WINDOW_SHARE * lent),
        lease_seconds=config.source.lease_seconds,
        max_attempts=config.source.max_attempts,
        checkpoint_every=every,
        producer_nic=link,
        producers_per_nic=max(1, hardware.devices_per_node // job.devices_per_producer),
        rank_nic=link,
        ranks_per_nic=max(1, hardware.devices_per_node // config.parallel.context),
        flow_rate=hardware.store_get_bytes_per_second,
        **{"costs": hardware.costs, **more},
    )


def rows(scenario: Scenario, result: Result) -> list[tuple[str, str]]:
    """For people."""
    return [
        ("ranks, producers, ledgers", f"{scenario.ranks}, {scenario.producers}, {scenario.ledgers}"),
        ("tokens a second", f"{result.tokens_per_second:,.0f}"),
        ("steps a second", f"{result.steps_per_second:.3g}"),
        ("share of the time lost: not a step's own", f"{result.lost_fraction:.1%}"),
        ("… that ranks wait for packs of their own", f"{result.wait_fraction:.1%}"),
        ("… that producers wait for work", f"{result.idle_fraction:.1%}"),
        ("the busiest ledger's load", f"{result.ledger:.1%}"),
        ("requests to all ledgers a second", f"{result.requests_per_second:,.0f}"),
        ("a request's wait for its turn, ms", f"{1e3 * result.ledger_queue:.2f}"),
        ("load of the store's master", f"{result.master:.1%}"),
        ("the busiest trainer node's network", f"{result.rank_nic:.1%}"),
        ("the busiest inference node's network", f"{result.producer_nic:.1%}"),
        ("most of the window that was used", f"{result.window:.1%}"),
        ("packs computed, lost, refused", f"{result.packs_computed}, {result.packs_lost}, {result.packs_refused}"),
        ("producers that died", f"{result.producers_died}"),
        ("restarts of the trainer", f"{result.trainer_restarts}"),
    ]
