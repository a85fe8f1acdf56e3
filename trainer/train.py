"""One rank of the trainer.

    torchrun --nproc-per-node 2 -m trainer.train --config-name <recipe> key=value …

or, as the launcher starts it, with `--config <run_dir>/config.yaml`. Exit status: 0 done, 2 something for a person to put
right, 75 asked to stop (SIGTERM, SIGUSR1) with all that was done in a checkpoint, anything else a crash.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from data_pipelines.engines import build_engine, resolve_dtype
from data_pipelines.errors import UserError
from data_pipelines.logs import configure_logging
from data_pipelines.network import own_address
from data_pipelines.orphans import end_with
from data_pipelines.stream.client import LedgerClient
from data_pipelines.stream.consumer import Prefetcher
from data_pipelines.stream.messages import read_token
from data_pipelines.stream.sources import Source, build_source

from . import STARTED_BY
from .checkpoint import Checkpointer, agree_on_checkpoint, forget_later_checkpoints, load_checkpoint
from .config import RunConfig, load_config, read_config, save_config
from .loop import PREEMPTED, Trainer
from .parallel import World, limit_waits, parallelize, process_group
from .parallel.context import ContextGroup, SharedPacks
from .reporting import Progress, RankMetrics, Reporter, serve_metrics
from .result import write_result
from .setup import prepare_run
from .target import FrozenTarget
from .tracking import Tracker

log = logging.getLogger("trainer")


def train(config: RunConfig, world: World) -> bool:
    """Returns False when the run was asked to stop before its end."""
    if config.cluster.threads:
        torch.set_num_threads(config.cluster.threads)
    setup = prepare_run(config)
    first = world.rank == 0
    frozen = FrozenTarget.load(setup.target, resolve_dtype(config.parallel.compute_dtype), world.device)
    strategy = parallelize(setup.build_drafter(frozen), config.parallel, config.optim, world)
    context = ContextGroup.of(world, config.parallel)
    checkpoints = setup.folder.checkpoints
    resume_from = agree_on_checkpoint(
        checkpoints, config.resume, setup.identity, world, setup.changes, setup.total_steps
    )
    start = load_checkpoint(resume_from, strategy) if resume_from else 0
    if first:
        if config.resume == "never":
            shutil.rmtree(checkpoints, ignore_errors=True)
            setup.folder.quarantined_packs.unlink(missing_ok=True)
        elif config.resume != "auto":
            forget_later_checkpoints(checkpoints, start)
        config = replace(config, resume="auto")  # ranks that are started again from the file below go on
        save_config(config, setup.folder.config)  # not sooner: another run's folder is left as it is
    session = f"{world.from_first([secrets.randbits(62)])[0]:016x}"  # after which the files above hold for every rank
    stop = setup.total_steps * config.global_batch
    indices = setup.plan.share(context.data_rank, context.data_size, start * config.global_batch, stop)
    items = ((i, setup.plan[i]) for i in indices)
    source = packs = None
    if context.fetches:
        source = build_source(
            config.source,
            config.store,
            setup.spec,
            setup.run_dir,
            rank=world.rank,
            session=session,
            engine=lambda: build_engine(setup.target, setup.spec, config.target.options),
        )
        packs = Prefetcher(source, items, config.source.prefetch)
    if context.size > 1:
        packs = SharedPacks(context, packs, items, setup.spec, strategy.drafter.lookahead_rows)
    tracker = Tracker(config.tracker, setup.run_dir, config, start_step=start) if first else None
    checkpointer = Checkpointer(checkpoints, config.checkpoint, setup.identity)
    limit_waits(config.parallel.timeout_seconds)  # of all groups, which exist by now
    progress = Progress(start, setup.total_steps)
    reporter = watched(config, world, progress, source, session)
    trainer = Trainer(setup, world, context, strategy, frozen, checkpointer, tracker, progress, session)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: trainer.request_stop())
    if first:
        log.info("steps %d…%d of %d packs each", start, setup.total_steps, config.global_batch)
    done = False
    try:
        to_the_end = trainer.run(packs, start)
        checkpointer.close()
        done = to_the_end
    finally:
        packs.close()
        if source:
            source.close()
        reporter.close(done=done)
        if tracker:
            tracker.close()
    if done:
        write_result(setup, strategy, world)
        if first:
            log.info("all %d steps are done; draftsmith export %s", setup.total_steps, setup.run_dir)
    return done


def watched(config: RunConfig, world: World, progress: Progress, source: Source | None, session: str) -> Reporter:
    """What others can see of this rank: reports to the ledger, if there is one, and metrics, if there is a port for them."""
    cluster, client = config.cluster, None
    if cluster.trainer_metrics_port:
        metrics = RankMetrics(progress, source.counts if source else Counter(), world.rank)
        serve_metrics(metrics, own_address(cluster.host), cluster.trainer_metrics_port + world.rank)
    if config.source.streams:
        token, ca_file = read_token(config.source.token_file), config.source.ca_file
        client = LedgerClient(config.source.ledger, token, ca_file=ca_file)
    return Reporter(client, progress, world, session, Path(config.run_dir))


def main(argv: list[str] | None = None) -> int:
    if torch.distributed.is_torchelastic_launched():
        end_with(STARTED_BY)
    config = _parse(sys.argv[1:] if argv is None else argv)
    configure_logging(f"rank-{os.environ.get('RANK', 0)}")
    with process_group(config.parallel.timeout_seconds) as world:
        config.check_ranks(world.size)
        return 0 if train(config, world) else PREEMPTED


def _parse(argv: list[str]) -> RunConfig:
    parser = argparse.ArgumentParser(prog="trainer.train", description="one rank of the trainer")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--config-name", metavar="RECIPE", help="a recipe's name or file")
    which.add_argument("--config", metavar="FILE", type=Path, help="a resolved config.yaml")
    parser.add_argument("--config-dir", metavar="FOLDER", help="a folder of recipes of your own")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args(argv)
    if options.config:
        return read_config(options.config, options.overrides)
    return load_config(options.config_name, options.overrides, options.config_dir)


def tell_torchrun(message: str) -> None:
    """torchrun ends with the message of the rank that failed first, below the traceback of its own."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(file).write_text(json.dumps({"message": message, "timestamp": str(int(time.time()))}))


if __name__ == "__main__":
    try:
        status = main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        tell_torchrun(f"error: {error}")
        status = 2
    except Exception:
        traceback.print_exc()
        status = 1
    # Everything is written and closed by now. The interpreter's own teardown is skipped: threads of the store's and gloo's
    # C++ libraries are sometimes still ending there, and then abort a rank that has done its work (seen as SIGABRT).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
