"""The commands that do one part of a run. Each imports what it needs when it is called."""

from __future__ import annotations

import argparse
import json
import os
import socket
from dataclasses import asdict
from pathlib import Path

from data_pipelines.errors import UserError
from data_pipelines.logs import configure_logging
from data_pipelines.run_folder import RunFolder


def doctor(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.markup import escape

    from .views.doctor import examine

    console, problems = Console(highlight=False, soft_wrap=True), 0
    for finding in examine(Path.cwd()):
        mark = "[green]ok[/]     " if finding.ok else "[red]problem[/]"
        console.print(f"{mark}  {finding.name:<20} {escape(finding.found)}")
        if not finding.ok:
            problems += 1
            console.print(f"{'':<9}{'':<20} fix: {escape(finding.fix)}")
    console.print("this machine is ready" if not problems else f"{problems} to put right")
    return 1 if problems else 0


def recipes(arguments: argparse.Namespace) -> None:
    import recipes as folder

    for path in sorted(Path(folder.__path__[0]).glob("*.yaml")):
        comment = [line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#")]
        print(f"{path.stem:<22} {comment[0].partition('. ')[0] if comment else ''}")


def regenerate(arguments: argparse.Namespace) -> None:
    from data_pipelines.engines import resolve_target
    from trainer.config import load_config

    from .stages.data import regenerate_rows

    config = load_config(arguments.recipe, arguments.overrides, arguments.config_dir)
    out = Path(arguments.out or Path(config.run_dir) / "regenerated.jsonl")
    result = regenerate_rows(config, resolve_target(config.target), out)
    print(f"{out}: {result.rows} rows; {json.dumps(asdict(result))}")


def ledger(arguments: argparse.Namespace) -> None:
    from data_pipelines.stream.config import SourceConfig
    from data_pipelines.stream.messages import read_token
    from data_pipelines.stream.server import serve

    path = RunFolder(arguments.recipe).ledger
    if not path.exists():
        from trainer.config import load_config

        from .stages.training import begin_by_hand

        path = begin_by_hand(load_config(arguments.recipe, arguments.overrides, arguments.config_dir))
    elif arguments.overrides:
        raise UserError(
            f"{arguments.recipe} has begun already: {' '.join(arguments.overrides)} would change nothing",
            where=str(path),
            fix="leave the overrides out, or begin anew with the recipe and run_dir=…",
        )
    try:
        settings = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"the ledger's settings cannot be read: {error}", where=str(path)) from error
    configure_logging("ledger")
    source = SourceConfig(**settings["source"])
    serve(
        settings["host"],
        settings["port"],
        read_token(source.token_file),
        settings["config"],
        source,
        tls_cert=settings["tls_cert"],
        tls_key=settings["tls_key"],
    )


def produce(arguments: argparse.Namespace) -> None:
    from data_pipelines.stream.client import LedgerClient
    from data_pipelines.stream.messages import read_token

    name = arguments.name or f"{socket.gethostname()}-{os.getpid()}"
    configure_logging(name)
    token = read_token(arguments.token_file)
    client = LedgerClient(arguments.ledger, token, ca_file=arguments.ca_file, patience=120.0)
    client.config()  # a wrong address is reported at once, before torch is loaded
    client.close()
    from data_pipelines.stream.producer import run_producer

    run_producer(
        arguments.ledger,
        token,
        name,
        ca_file=arguments.ca_file,
        metrics_host=arguments.metrics_host,
        metrics_port=arguments.metrics_port,
    )


def capture(arguments: argparse.Namespace) -> None:
    from data_pipelines.engines import build_engine
    from data_pipelines.stream.cache import capture as fill
    from trainer.config import load_config, read_config
    from trainer.setup import prepare_run

    if not arguments.recipe and not arguments.config:
        raise UserError("capture takes a recipe or --config", fix="draftsmith capture --help")
    shard, _, shards = arguments.shard.partition("/")
    if not (shard.isdigit() and shards.isdigit() and int(shard) < int(shards)):
        raise UserError(f"--shard {arguments.shard} is not I/N with I < N", fix="0/1 is all of them")
    if arguments.config:
        # Beside --config, the first override stands where a recipe would.
        config = read_config(Path(arguments.config), [*filter(None, [arguments.recipe]), *arguments.overrides])
    else:
        config = load_config(arguments.recipe, arguments.overrides, arguments.config_dir)
    setup = prepare_run(config)
    folder = Path(config.source.cache_dir or setup.folder.features)
    configure_logging(f"capture-{shard}")
    packs = setup.plan.packs
    engine = build_engine(setup.target, setup.spec, setup.config.target.options)
    done = fill(packs, engine, setup.spec, folder, shard=int(shard), shards=int(shards))
    print(f"{folder}: {done.computed} packs computed ({done.bytes / 1e6:,.0f} MB), {done.found} were there")


def evaluate(arguments: argparse.Namespace) -> None:
    from trainer.config import read_config
    from trainer.decoding.run import evaluate_run

    from .views.judge import table

    run_dir = Path(arguments.run_dir)
    config = read_config(RunFolder(run_dir).config, arguments.overrides)
    # Under a name of its own: before.json and after.json are the run's record.
    judged = evaluate_run(config, run_dir, "before" if arguments.untrained else "after", name="asked")
    if arguments.json:
        print(json.dumps(judged, indent=2))
        return
    print("\n".join(table(judged)))
    print(f"details: {run_dir / 'evaluation' / 'asked.json'}")


def calibrate(arguments: argparse.Namespace) -> None:
    from trainer.config import read_config
    from trainer.decoding.calibrate import calibrate_run

    run_dir = Path(arguments.run_dir)
    measured = calibrate_run(read_config(RunFolder(run_dir).config, arguments.overrides), run_dir)
    if arguments.json:
        print(json.dumps(measured, indent=2))
        return
    scores = ("ece", "brier", "auc")
    print("draft  temperature  rounds  accepted" + "".join(f"  {name.upper():^15}" for name in scores))
    for k, position in enumerate(measured["positions"], start=1):
        before, after = position["before"], position["after"]
        changes = "".join(f"  {_number(before[name])} → {_number(after[name])}" for name in scores)
        print(f"{k:>5}  {position['temperature']:>11.3f}  {before['rounds']:>6,}  {before['accepted']:>8.3f}{changes}")
    prompts = measured["prompts"]
    print(
        f"fitted on {prompts['fitted']} prompts, measured on {prompts['held_out']} others;"
        f" the temperatures are in {run_dir / 'export' / 'config.json'}"
    )


def export(arguments: argparse.Namespace) -> None:
    from trainer.config import read_config
    from trainer.export.run import export_run, stitch_run
    from trainer.setup import prepare_run

    for override in arguments.overrides:
        if not override.startswith("export."):
            raise UserError(
                f"{override.partition('=')[0]} cannot be changed by an export: it belongs to the finished training",
                fix="give export.* only; --out and --step are options",
            )
    run_dir = Path(arguments.run_dir)
    setup = prepare_run(read_config(RunFolder(run_dir).config, arguments.overrides))
    if arguments.stitch:
        print(stitch_run(setup, Path(arguments.stitch), step=arguments.step))
        return
    print(export_run(setup, step=arguments.step, out=Path(arguments.out) if arguments.out else None))


def _number(value: float | None) -> str:
    return f"{'—':>6}" if value is None else f"{value:.4f}"
