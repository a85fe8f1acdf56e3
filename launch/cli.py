"""The command `draftsmith`: parses, dispatches, and turns what went wrong into a message for a person.

Exit status: 0 done; 1 a check found a problem, or a fault of ours (with its traceback); 2 something the person can put
right (`error: …`); 75 stopped from outside after a checkpoint; 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from data_pipelines.errors import UserError, did_you_mean

from .supervision.processes import Terminated

PREEMPTED, INTERRUPTED = 75, 130


@dataclass(frozen=True)
class Command:
    """help: one line. arguments: adds to the parser. run: `module:function`, imported only when it is called."""

    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: str


_A_RECIPE = "a name (`draftsmith recipes` lists them) or a YAML file"


def _recipe(parser: argparse.ArgumentParser, *, optional: bool = False, recipe: str = _A_RECIPE) -> None:
    number = {"nargs": "?"} if optional else {}
    parser.add_argument("recipe", help=recipe, **number)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a value, such as optim.lr=1e-3")
    parser.add_argument("--config-dir", metavar="FOLDER", help="your own recipes and groups, such as cluster/site.yaml")


def _finished_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", help="the folder of a run, the one that holds config.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as evaluate.max_prompts=200")


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    _recipe(parser, optional=True)
    parser.add_argument("--config", metavar="FILE", help="instead of a recipe: a resolved config.yaml")
    parser.add_argument("--plan", action="store_true", help="print what would run, and run nothing")


def _slurm_arguments(parser: argparse.ArgumentParser) -> None:
    _recipe(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the script, and submit nothing")


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    _recipe(parser)
    parser.add_argument("--samples", type=float, metavar="N", help="documents, such as 600e3 (default: counted)")
    parser.add_argument("--tokens", type=float, metavar="N", help="tokens of all documents, once, such as 6e9")
    parser.add_argument("--mean-tokens", type=float, metavar="N", help="tokens of a document")
    parser.add_argument("--supervised", type=float, metavar="SHARE", help="of the tokens, that are trained on")
    parser.add_argument("--json", action="store_true", help="print everything, as JSON")


def _simulate_arguments(parser: argparse.ArgumentParser) -> None:
    _plan_arguments(parser)
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="to simulate, once the pipeline is full")
    parser.add_argument("--ledgers", type=int, default=1, metavar="N", help="what if the ledger were sharded")
    for role in ("producer", "rank"):
        text = f"hours that a {role} lives on average (0: for ever)"
        parser.add_argument(f"--{role}-mtbf", type=float, default=0.0, metavar="H", help=text)
    parser.add_argument("--seed", type=int, default=0)


def _bench_node_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", help="write what was measured, for cluster.hardware.device=FILE")


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    _recipe(parser)
    parser.add_argument("--rows", type=int, default=5, metavar="N", help="how many rows to show (default: 5)")
    parser.add_argument("--quarantined", action="store_true", help="show rows that are not trained on")
    parser.add_argument("--html", metavar="FILE", help="write a page as well")


def _prepare_arguments(parser: argparse.ArgumentParser) -> None:
    _recipe(parser)
    parser.add_argument("--json", action="store_true", help="print the counts, and nothing else, as JSON")


def _regenerate_arguments(parser: argparse.ArgumentParser) -> None:
    _recipe(parser)
    parser.add_argument("--out", help="the file to write (default: <run_dir>/regenerated.jsonl)")


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    _finished_run(parser)
    parser.add_argument("--untrained", action="store_true", help="judge the untrained drafter")
    parser.add_argument("--json", action="store_true", help="print everything that was measured")


def _plugins(parser: argparse.ArgumentParser) -> None:
    text = "modules of your own that register a drafter (docs/extending.md)"
    parser.add_argument("--plugins", nargs="+", default=[], metavar="MODULE", help=text)


def _judge_arguments(parser: argparse.ArgumentParser) -> None:
    _plugins(parser)
    parser.add_argument("--target", required=True, metavar="T", help="a folder, a hub id, or tiny, or smollm2_135m")
    parser.add_argument("--draft", required=True, metavar="D", help="an export, a run's folder, or a hub id")
    parser.add_argument("--prompts", metavar="FILE", help="rows with `messages` and, optionally, `domain`")
    parser.add_argument("--max-prompts", type=int, metavar="N", help="as evaluate.max_prompts, and so the following")
    parser.add_argument("--max-new-tokens", type=int, metavar="N")
    parser.add_argument("--batch-size", type=int, metavar="N")
    parser.add_argument("--draft-tokens", type=int, metavar="N", help="drafted a round (default: what the export says)")
    parser.add_argument("--seed", type=int, default=0, help="which prompts are drawn")
    parser.add_argument("--out", metavar="FILE", help="write everything that was measured")
    parser.add_argument("--json", action="store_true", help="print it")


def _calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    _finished_run(parser)
    parser.add_argument("--json", action="store_true", help="print everything that was measured")


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    _finished_run(parser)
    parser.add_argument(
        "--step", type=int, help="the checkpoint to take (default: the newest; a broken one is refused)"
    )
    parser.add_argument("--out", help="the folder to write (default: <run_dir>/export)")
    parser.add_argument("--stitch", metavar="FOLDER", help="instead: a copy of the target with its MTP head replaced")


def _produce_arguments(parser: argparse.ArgumentParser) -> None:
    _ledger_address(parser, required=True)
    parser.add_argument("--name", help="what the ledger calls this producer (default: host and process id)")
    parser.add_argument("--metrics-port", type=int, default=0, metavar="N", help="serve Prometheus metrics there")
    parser.add_argument("--metrics-host", default="127.0.0.1", metavar="ADDRESS", help="… bound to this address")


def _status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", nargs="?", help="the folder of a run (default: the newest one in outputs/)")
    _ledger_address(parser, required=False)
    parser.add_argument("--watch", action="store_true", help="again every two seconds, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print everything that is known")


def _ledger_address(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument("--ledger", required=required, metavar="URL", help="http(s)://host:port of the run's ledger")
    parser.add_argument("--token-file", required=required, help="the file that holds the run's bearer token")
    parser.add_argument("--ca-file", default="", metavar="PEM", help="who signed the ledger's certificate, for https")


def _ledger_arguments(parser: argparse.ArgumentParser) -> None:
    _recipe(parser, recipe="a recipe, to begin a run whose roles are started by hand; or a run's folder")


def _capture_arguments(parser: argparse.ArgumentParser) -> None:
    _recipe(parser, optional=True)
    parser.add_argument("--config", metavar="FILE", help="instead of a recipe: config.yaml of a run")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="compute the I-th of N shares of the packs")


def _check_target_arguments(parser: argparse.ArgumentParser) -> None:
    _plugins(parser)
    parser.add_argument("target", help="a hub id, a directory, tiny or smollm2_135m")
    parser.add_argument(
        "--dtype", default="auto", help="to load it in: auto (float32 if there is memory), float32, bfloat16"
    )
    parser.add_argument("--json", action="store_true", help="print everything that was found, as JSON")


def _nothing(parser: argparse.ArgumentParser) -> None:
    del parser


COMMANDS = {
    "run": Command("a whole run on this machine, from prompts to the report", _run_arguments, "launch.run:command"),
    "slurm": Command("the same, as a job on a Slurm cluster", _slurm_arguments, "launch.slurm.submit:command"),
    "plan": Command(
        "what a run will take: memory, links, time, money", _plan_arguments, "launch.planner.command:command"
    ),
    "simulate": Command(
        "a plan's run as a simulation, with queues and failures",
        _simulate_arguments,
        "launch.planner.simulation.command:command",
    ),
    "bench-node": Command("measure this machine for plans", _bench_node_arguments, "launch.planner.bench_node:command"),
    "status": Command("how a run stands, now", _status_arguments, "launch.views.status:command"),
    "check-target": Command(
        "does this target fit? logits, taps, drafters, judge, memory",
        _check_target_arguments,
        "launch.views.check_target:command",
    ),
    "prepare": Command(
        "rows → documents and packs; prints what became of them", _prepare_arguments, "launch.views.prepare:command"
    ),
    "inspect": Command("show rows with what of them is trained on", _inspect_arguments, "launch.views.inspect:command"),
    "regenerate": Command(
        "let the target answer the prompts itself", _regenerate_arguments, "launch.commands:regenerate"
    ),
    "ledger": Command("the ledger of a run", _ledger_arguments, "launch.commands:ledger"),
    "produce": Command("one producer of hidden states", _produce_arguments, "launch.commands:produce"),
    "capture": Command("fill the folder of features of source=offline", _capture_arguments, "launch.commands:capture"),
    "evaluate": Command("decode with a trained drafter, per domain", _evaluate_arguments, "launch.commands:evaluate"),
    "judge": Command(
        "decode with any drafter of the format, ours or not", _judge_arguments, "launch.views.judge:command"
    ),
    "calibrate": Command(
        "fit the confidence of a trained DSpark drafter", _calibrate_arguments, "launch.commands:calibrate"
    ),
    "export": Command("a checkpoint → the speculator format", _export_arguments, "launch.commands:export"),
    "recipes": Command("list the recipes", _nothing, "launch.commands:recipes"),
    "doctor": Command("is this machine ready?", _nothing, "launch.commands:doctor"),
}


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are UserErrors, like all others."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(message.replace(", key=value", ""), fix=f"{self.prog} --help")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        return _dispatch(sys.argv[1:] if arguments is None else arguments)
    except UserError as error:
        print_error(error)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"stopped{': ' + str(interrupt) if str(interrupt) else ''}", file=sys.stderr)
        return PREEMPTED if isinstance(interrupt, Terminated) else INTERRUPTED
    except BrokenPipeError:  # `draftsmith recipes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def print_error(error: UserError) -> None:
    """`error: what`, then where and fix on lines of their own: the launcher reads this back from a child's log."""
    print(f"error: {error}", file=sys.stderr, flush=True)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        fix = did_you_mean(name, COMMANDS) or f"one of: {', '.join(COMMANDS)}"
        raise UserError(f"there is no command '{name}'", fix=fix)
    command = COMMANDS[name]
    parser = _Parser(prog=f"draftsmith {name}", description=command.help)
    command.arguments(parser)
    parsed = parser.parse_intermixed_args(rest)
    module, _, function = command.run.partition(":")
    return getattr(importlib.import_module(module), function)(parsed) or 0


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "draftsmith trains drafters for speculative decoding on hidden states streamed from a frozen target.",
            "",
            *lines,
            "",
            "`draftsmith <command> --help` says more. The trainer alone:",
            "  torchrun --nproc-per-node N -m trainer.train --config-name <recipe> key=value …",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
