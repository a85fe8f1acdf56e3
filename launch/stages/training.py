"""The training stage: the run's processes started in order, watched to the end, and stopped whatever happens."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from data_pipelines.errors import UserError
from data_pipelines.files import write_text_atomically
from data_pipelines.run_folder import RunFolder
from data_pipelines.stream.messages import producer_config
from trainer.checkpoint import newest_step
from trainer.cluster import ClusterConfig
from trainer.config import RunConfig, save_config
from trainer.loop import PREEMPTED
from trainer.setup import RunSetup, prepare_run

from ..placement import Placement
from ..supervision import roles
from ..supervision.failures import describe, told_to_stop
from ..supervision.processes import Child, Crew, Role, Stopped, Terminated, end_hung
from ..supervision.screen import MetricsTail, Screen, TrainingView
from ..supervision.watch import watching
from .preflight import check_tls
from .results import finished

_CHECKPOINT_GRACE = 120.0  # least seconds for the trainer to write one when the run is stopped
_POLL = 0.2


def train(setup: RunSetup, placement: Placement, ports: dict[str, int], screen: Screen) -> str:
    """Run the training from the newest checkpoint (or the start) to its end. Returns what there is to say about it.

    Raises UserError with the cause when it fails, and Stopped when the person or the system ended it.
    """
    run_dir, total = setup.run_dir, setup.total_steps
    found = setup.choose_checkpoint()
    done = int(found.name.removeprefix("step_")) if found else 0
    if done == total and finished(run_dir, total):
        return f"all {total} steps were done already (resume=never starts afresh)"
    for made in (setup.folder.training, setup.folder.summary):  # of fewer steps: not to be taken for what follows
        made.unlink(missing_ok=True)
    config = roles.connect(setup.config, run_dir, ports)
    save_config(config, setup.folder.config)
    if config.source.streams:
        roles.write_token(Path(config.source.token_file))
        write_ledger_settings(config, setup, ports)
    crew = Crew(setup.folder.logs, config.cluster.max_restarts)
    try:
        with screen.training(total) as view:
            if done:
                view.say(f"going on from step {done}")
            if config.source.streams:
                view.say(f"watch it: draftsmith status {run_dir} --watch")
                view.say(f"      or: {config.source.ledger}/#token=<the text in {config.source.token_file}>")
            if config.source.name == "offline":
                _capture(crew, roles.captures(config, run_dir, placement), run_dir, view)
            _start_stream(crew, config, run_dir, placement, ports)
            trainer = crew.start_trainer(roles.trainer(config, run_dir, placement, ports))
            with watching(crew, config, ports):
                try:
                    _watch(crew, trainer, config, total, view)
                except Stopped:
                    if trainer.status is None:
                        view.say("stopping: waiting for the trainer's checkpoint (Ctrl-C to stop at once)")
                        _stop_gently(trainer, config.cluster)
                    raise
    except Stopped as stopped:
        raise type(stopped)(_how_to_resume(config, run_dir)) from None
    finally:
        with _uninterrupted():
            crew.stop()
    restarts = ", ".join(f"{name} {count}×" for name, count in sorted(crew.restarted.items()))
    return f"{total - done} steps" + (f"; restarted: {restarts}" if restarts else "")


def write_ledger_settings(config: RunConfig, setup: RunSetup, ports: dict[str, int]) -> None:
    """`<run_dir>/ledger.json`: all that the ledger needs, so that it starts again in a moment, without torch."""
    cluster, lease = config.cluster, config.source.lease_seconds
    settings = {
        "host": cluster.host,
        "port": ports["ledger"],
        "tls_cert": cluster.tls_cert and str(Path(cluster.tls_cert).resolve()),
        "tls_key": cluster.tls_key and str(Path(cluster.tls_key).resolve()),
        "source": asdict(config.source),
        "config": producer_config(
            config.target,
            config.store,
            setup.spec,
            threads=cluster.threads,
            lease_seconds=lease,
            plugins=config.plugins,
        ),
    }
    write_text_atomically(setup.folder.ledger, json.dumps(settings, indent=2))


def begin_by_hand(config: RunConfig) -> Path:
    """What `draftsmith ledger <recipe>` leaves in the run's folder: config.yaml, ledger.token, ledger.json.

    The other roles can then be started by hand, also on other machines. Returns the path of ledger.json.
    """
    if not config.source.streams:
        raise UserError(f"source={config.source.name} needs no ledger", fix="add source=stream")
    if not config.cluster.ledger_port:
        raise UserError("the ledger needs a port that the others know", fix="add cluster.ledger_port=8700")
    if config.has_store and ":" not in config.store.master:
        raise UserError(
            "the producers need the store's address", fix="start mooncake_master and add store.master=<host>:<port>"
        )
    check_tls(config)
    setup = prepare_run(config)
    ports = {"ledger": config.cluster.ledger_port}  # the store's is in store.master
    token = setup.folder.token
    if not token.exists():  # the ledger may be started again; the others keep their token
        roles.write_token(token)
    config = roles.connect(config, setup.run_dir, ports)
    save_config(config, setup.folder.config)
    write_ledger_settings(config, setup, ports)
    return setup.folder.ledger


def _start_stream(crew: Crew, config: RunConfig, run_dir: Path, placement: Placement, ports: dict[str, int]) -> None:
    if not config.source.streams:
        return
    host = config.cluster.host
    if config.has_store:
        from data_pipelines.stores.mooncake import wait_ready

        master = crew.start_helper(roles.master(config, ports))
        try:
            wait_ready(host, ports["store"], ports["metrics"], process=master.process)
        except UserError as error:
            raise master.failure(error.what) from error
    crew.start_helper(roles.ledger(run_dir))
    for role in roles.producers(config, placement):
        crew.start_helper(role)


def _capture(crew: Crew, capturing: list[Role], run_dir: Path, view: TrainingView) -> None:
    """source=offline: fill the folder of features first. What is already there is not computed again."""
    captures = [Child(role, RunFolder(run_dir).logs) for role in capturing]
    crew.helpers.extend(captures)
    view.say(f"capturing features with {len(captures)} processes")
    while any(child.status != 0 for child in captures):
        for child in captures:
            if child.status not in (None, 0):
                raise child.failure(f"{child.role.name} {describe(child.status)}")
        time.sleep(_POLL)
    crew.helpers.clear()


def _watch(crew: Crew, trainer: Child, config: RunConfig, total: int, view: TrainingView) -> None:
    """Until the training is done. Whoever dies meanwhile is started again, the trainer from its newest checkpoint."""
    run_dir = Path(config.run_dir)
    metrics, result, patience = (
        MetricsTail(RunFolder(run_dir).metrics),
        RunFolder(run_dir).training,
        config.cluster.hang_seconds,
    )
    step, all_steps_done = 0, False
    while True:
        status = trainer.status
        if status is None and patience and result.exists() and time.time() - result.stat().st_mtime > patience:
            end_hung(trainer, trainer.process, f"it had not ended {patience:g} s after its result")
        for row in metrics.rows()[-1:]:
            step = row["step"] + 1
            all_steps_done = step == total
            view.show(row)
        if status is not None:
            if finished(run_dir, total):
                if status != 0:
                    view.say(f"{trainer.ending().what}; all its steps are done and written")
                return
            if told_to_stop(trainer.said(), PREEMPTED):
                raise Terminated("the trainer was told to stop")
            view.say(f"{crew.revive(trainer, step=step)}, going on from step {newest_step(run_dir)}")
            all_steps_done = False
        if not all_steps_done:  # after the last one producers go
            for line in crew.tend():
                view.say(line)
        time.sleep(_POLL)


def _stop_gently(trainer: Child, cluster: ClusterConfig) -> None:
    """SIGUSR1 asks the ranks for a checkpoint at their next step; the stream goes on until they have it. (SIGTERM would
    do on this machine, and srun does not hand it on but ends its tasks.)"""
    trainer.signal(signal.SIGUSR1)
    grace = max(_CHECKPOINT_GRACE, cluster.slurm.grace_seconds if cluster.launcher == "slurm" else 0)
    deadline = time.monotonic() + grace
    while trainer.status is None and time.monotonic() < deadline:
        time.sleep(_POLL)


def _how_to_resume(config: RunConfig, run_dir: Path) -> str:
    step = newest_step(run_dir)
    kept = f"{step} steps are saved in {run_dir}" if step else "no checkpoint was written yet"
    return f"{kept}; the same command goes on from there (draftsmith run {config.recipe} …)"


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Signals are put off: children must not be left because somebody is impatient. It takes seconds at most."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
