"""`draftsmith check-target`: does this target fit? A table, or JSON; exit status 0 (it fits) or 2 (it does not)."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from data_pipelines.engines import Target, TargetConfig, resolve_dtype, resolve_target
from data_pipelines.engines.targets import weight_files
from data_pipelines.plugins import load_plugins
from trainer.fit import Fit, check_target


def command(arguments: argparse.Namespace) -> int:
    load_plugins(arguments.plugins)
    target = resolve_target(TargetConfig.named(arguments.target))
    dtype = _dtype(target) if arguments.dtype == "auto" else resolve_dtype(arguments.dtype)
    fit = check_target(target, dtype)
    if arguments.json:
        print(json.dumps(fit.to_json(), indent=2))
    else:
        _show(fit)
    return 0 if fit.fits else 2


def _dtype(target: Target) -> torch.dtype:
    """float32, which shows the smallest differences, if the target and a copy of it in float32 fit into half the memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
    stored = sum(file.stat().st_size for file in weight_files(Path(target.path)))
    return torch.float32 if 2 * stored <= memory / 2 else torch.bfloat16


def _show(fit: Fit) -> None:
    console = Console(highlight=False)
    console.print(
        f"{escape(fit.target)}: {fit.model_class or 'not loaded'} ({fit.family or 'unknown'}), in {fit.dtype}"
    )
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in fit.findings:
        figure = ""
        if finding.difference is not None:
            figure = f" ({finding.difference:.1e} of at most {finding.limit:.1e})"
        table.add_row(_mark(finding.fits), finding.name, escape(finding.says + figure))
    for name, why in fit.drafters.items():
        says = f"can be trained: weights and optimizer take {decimal(fit.memory_bytes.get(f'rank, {name}', 0))} on one rank"
        table.add_row(_mark(why is None), name, escape(why or says))
    for role in ("producer", "judge, float32"):
        if role in fit.memory_bytes:
            table.add_row("", role, f"{decimal(fit.memory_bytes[role])} of weights")
    console.print(table)
    console.print("this target fits" if fit.fits else "this target does not fit")


def _mark(fits: bool) -> str:
    return "[green]ok[/]" if fits else "[red]no[/]"
