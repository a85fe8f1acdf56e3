"""`draftsmith status`: one screen of a run, from its ledger if that answers, else from what the run's folder tells."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import OmegaConf
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from data_pipelines.errors import UserError
from data_pipelines.run_folder import RunFolder
from data_pipelines.stream.client import LedgerClient
from data_pipelines.stream.config import SourceConfig
from data_pipelines.stream.messages import read_token
from trainer.seal import RUN_FILE

from ..slurm.queue import job_of

# Nothing is imported that loads torch: that would take longer than all the rest.
_HANG_SECONDS = 60.0  # where no config.yaml says it
_EVERY_SECONDS = 2.0
_ALIVE_SECONDS = 5.0  # ranks report every second, idle producers ask every other one
_ERRORS = 5


@dataclass(frozen=True)
class Place:
    """Where a run is looked for. run_dir: None when only its ledger is known."""

    run_dir: Path | None
    ledger: str = ""
    token_file: str = ""
    ca_file: str = ""
    rank_patience: float = _HANG_SECONDS
    producer_patience: float = _HANG_SECONDS + SourceConfig.lease_seconds

    def ask(self) -> dict[str, Any]:
        """The ledger's numbers. Raises UserError when there is none, or it does not answer."""
        if not self.ledger:
            raise UserError("this run has no ledger")
        client = LedgerClient(self.ledger, read_token(self.token_file), ca_file=self.ca_file)
        try:
            return client.status(patience=0.0)
        finally:
            client.close()


def command(arguments: argparse.Namespace) -> None:
    place = find(arguments)
    if arguments.json:
        print(json.dumps(look(place)))
        return
    console = Console(highlight=False)
    if not arguments.watch:
        console.print(render(look(place), place))
        return
    try:
        with Live(render(look(place), place), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(_EVERY_SECONDS)
                live.update(render(look(place), place), refresh=True)
    except KeyboardInterrupt:
        return  # this is how one stops watching


def find(arguments: argparse.Namespace) -> Place:
    """The run that the command line means."""
    if arguments.ledger:
        if arguments.run_dir or not arguments.token_file:
            raise UserError(
                "status takes a run's folder, or --ledger with --token-file", fix="draftsmith status --help"
            )
        return Place(None, arguments.ledger, arguments.token_file, arguments.ca_file)
    run_dir = Path(arguments.run_dir) if arguments.run_dir else _newest(Path("outputs"))
    if not run_dir.is_dir():
        raise UserError(f"there is no folder {run_dir}", fix="draftsmith status <the run_dir of a run>")
    if not RunFolder(run_dir).config.exists():
        return Place(run_dir)
    config = OmegaConf.load(RunFolder(run_dir).config)  # not read_config: a run of another version can be looked at
    hang = OmegaConf.select(config, "cluster.hang_seconds", default=0.0) or float("inf")
    return Place(
        run_dir,
        OmegaConf.select(config, "source.ledger", default=""),
        arguments.token_file or OmegaConf.select(config, "source.token_file", default=""),
        arguments.ca_file or OmegaConf.select(config, "source.ca_file", default=""),
        hang,
        hang + OmegaConf.select(config, "source.lease_seconds", default=SourceConfig.lease_seconds),
    )


def look(place: Place) -> dict[str, Any]:
    """{"run_dir", "state", "says"} and, while its ledger answers (state "streaming"), "ledger": all that it knows."""
    if place.run_dir is None:
        return {"run_dir": None, "state": "streaming", "says": "", "ledger": place.ask()}
    found = {"run_dir": str(place.run_dir)}
    try:
        return {**found, "state": "streaming", "says": "", "ledger": place.ask()}
    except UserError as error:
        state, says = _story(place.run_dir)
        silent = f" No ledger answers at {place.ledger}: {error.what}." if state == "running" and place.ledger else ""
        job, stands = job_of(place.run_dir)
        queue = f" Slurm's job {job} is {stands}." if stands else ""
        return {**found, "state": state, "says": says + silent + queue}


def _newest(folder: Path) -> Path:
    runs = sorted(folder.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise UserError(f"there is no run in {folder.resolve()}", fix="draftsmith status <the run_dir of a run>")
    return runs[-1].parent


def _story(run_dir: Path) -> tuple[str, str]:
    """(state, a sentence) from the folder alone."""
    run = RunFolder(run_dir)
    steps = [int(path.parent.name.removeprefix("step_")) for path in run.checkpoints.glob(f"step_*/{RUN_FILE}")]
    step, again = max(steps, default=0), "the same command goes on from there"
    if _is_held(run_dir / ".lock"):
        done = f"{step} steps are saved" if step else "nothing is saved yet"
        return "running", f"A run is under way, in a stage without a stream (or its ledger is starting); {done}."
    if run.summary.exists():
        summary = json.loads(run.summary.read_text())
        return "finished", f"Finished: {summary['steps']} steps; see {run.report}."
    if run.training.exists():
        return "trained", f"The training is finished ({step} steps), the stages after it are not: {again}."
    if step:
        return "interrupted", f"Interrupted; {step} steps are saved: {again}."
    if run.config.exists():
        return "interrupted", "Interrupted before its first checkpoint: the same command starts it again."
    return "not started", "Never started: this folder has no config.yaml."


def _is_held(lock: Path) -> bool:
    """Whether a launcher works in the folder."""
    if not lock.exists():
        return False
    try:
        with FileLock(lock, timeout=0):
            return False
    except Timeout:
        return True


def render(seen: dict[str, Any], place: Place) -> RenderableType:
    snapshot = seen.get("ledger")
    title = seen["run_dir"] or place.ledger
    if snapshot is None:
        return Text(f"{title}\n{seen['says']}")
    parts = [Text(title, style="bold"), *_overview(snapshot)]
    if snapshot["ranks"]:
        parts.append(_ranks(snapshot, place.rank_patience))
    parts.append(_producers(snapshot, place.producer_patience))
    errors = snapshot["errors"][-_ERRORS:]
    if errors:
        parts.append(Text("last errors", style="bold"))
        parts += [Text(f"  {e['ago']:>6.0f} s ago  {e['who']}: {e['message']}", overflow="ellipsis") for e in errors]
    return Group(*parts)


def _overview(snapshot: dict[str, Any]) -> Iterator[Text]:
    rows, ranks = snapshot["curve"], snapshot["ranks"]
    newest = rows[-1] if rows else {}
    yield Text(f"step {ranks[0]['step']} of {ranks[0]['total_steps']}" if ranks else "no rank has reported yet")
    yield Text(
        f"loss {_number(newest.get('loss'))}   acceptance ≈ {_number(newest.get('expected_length'), 2)}"
        f"   waiting {_share(newest.get('wait_fraction'))}   session {snapshot['session'] or '–'}"
    )
    rates, window, packs = snapshot["rates"], snapshot["window"], snapshot["packs"]
    yield Text(
        f"{_number(rates['packs_per_second'], 2)} packs/s   {_size(rates['bytes_per_second'])}/s"
        f"   {_number(rates['tokens_per_second'], 0)} tokens/s"
    )
    limit = _size(window["limit"]) if window["limit"] else "no limit"
    garbage = f" ({_size(window['garbage'])} of it to be removed)" if window["garbage"] else ""
    states = "   ".join(f"{state} {count}" for state, count in packs.items())
    yield Text(f"window {_size(window['used'])} of {limit}{garbage}   packs: {states}")


def _ranks(snapshot: dict[str, Any], patience: float) -> Table:
    table = _table("rank", "", "step", "waiting", "heard of", "process")
    for rank in snapshot["ranks"]:
        cells = (rank["step"], _share(rank["wait_fraction"]))
        _row(table, rank["rank"], _state(rank["seen"], patience), cells, rank)
    return table


def _producers(snapshot: dict[str, Any], patience: float) -> Table:
    table = _table("producer", "", "works on", "stored", "failed", "expired", "busy", "heard of", "process")
    for p in snapshot["producers"]:
        spent = p["compute_seconds"] + p["idle_seconds"]
        busy = _share(p["compute_seconds"] / spent if spent else None)
        works_on = "–" if p["works_on"] is None else f"pack {p['works_on']}"
        cells = (works_on, p["stored"], p["failed"], p["expired"], busy)
        # One that computes says nothing.
        state = "alive" if p["works_on"] is not None and p["seen"] <= patience else _state(p["seen"], patience)
        _row(table, p["name"], state, cells, p)
    return table


def _state(age: float, patience: float) -> str:
    if age <= _ALIVE_SECONDS:
        return "alive"
    return "late" if age <= patience else "hung"


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True, min_width=len("alive") if not column else None)
    return table


def _row(table: Table, name: Any, state: str, cells: tuple[Any, ...], caller: dict[str, Any]) -> None:
    """What a narrow terminal cuts off stands last."""
    style = {"alive": "green", "late": "yellow", "hung": "red"}[state]
    rest = (*cells, f"{caller['seen']:.0f} s ago", f"{caller['host']} {caller['pid']}")
    table.add_row(Text(str(name)), Text(state, style=style), *(Text(str(cell)) for cell in rest))


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _size(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"
