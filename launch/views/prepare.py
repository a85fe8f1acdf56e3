"""`draftsmith prepare <recipe>`: rows → documents and packs, with a summary that adds up to the number of rows."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from data_pipelines.conversations.config import DataConfig
from data_pipelines.conversations.shards import Counts
from trainer.config import load_config
from trainer.setup import RunSetup, prepare_run

from ..stages import data

_BAR = 40  # characters of the longest bar of the histogram


def command(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.recipe, arguments.overrides, arguments.config_dir)
    if arguments.json:
        print(json.dumps(data.counts(prepare_run(config)), indent=2))
        return
    _show(intentions(config.data))
    print()
    setup = prepare_run(config)
    _show(summary(setup))


def intentions(config: DataConfig) -> list[tuple[str, str]]:
    """(name, what) of each thing that will be done, for people."""
    shape = f"rows of {config.format}" if config.format != "auto" else "rows of any shape, by their keys"
    asked = {"never": "as they are", "always": "written by the target", "sample": "as they are, some of them checked"}
    long = {"clip": "cut there", "split": "split into several", "quarantine": "left out, with their rows"}
    trained = f"{'the last turn' if config.train_on == 'last' else 'every turn'} of {', '.join(config.roles)}"
    return [
        ("data", f"{config.path}: {shape}{f', the first {config.max_rows:,}' if config.max_rows else ''}"),
        ("answers", asked[config.regenerate.mode]),
        ("trained on", f"{trained}; reasoning: {config.reasoning}"),
        ("long ones", f"documents of more than {config.max_document_tokens:,} tokens are {long[config.too_long]}"),
        ("packs", f"of {config.pack_tokens:,} tokens"),
        ("stops", f"when more than {config.max_quarantined_fraction:.0%} of the rows are quarantined"),
    ]


def summary(setup: RunSetup) -> list[tuple[str, str]]:
    """(name, what) of what became of the rows, for people; a line without a name goes on from the one before."""
    counts, documents, packs = setup.prepared.counts, setup.prepared.documents, setup.plan.packs
    lines = [
        ("rows", f"{counts.rows:,} = {counts.trained:,} trained on + {counts.quarantined:,} quarantined"),
        ("shapes", ", ".join(f"{n:,} {shape}" for shape, n in counts.shapes.items())),
        *_named("repaired", [f"{n:,} rows: {rule}" for rule, n in counts.repairs.items()]),
        *_named("quarantined", _reasons(counts)),
        ("documents", _documents(counts)),
        *_named("tokens each", _histogram(documents.lengths)),
        ("tokens", f"{counts.tokens:,}, of them {counts.supervised / counts.tokens:.1%} trained on"),
        ("packs", f"{len(packs):,} of {packs.pack_tokens:,} tokens, {packs.padding_share:.2%} of their room unused"),
        ("vocabulary", data.vocabulary(setup)),
        ("steps", f"{setup.total_steps:,}, over {setup.config.epochs} epochs"),
    ]
    if counts.quarantined:
        lines.append(("", f"every quarantined row with its reason: {Path(setup.run_dir) / 'quarantine.jsonl'}"))
    return lines


def _reasons(counts: Counts) -> list[str]:
    return [f"{n:,} × {reason} (first: {counts.examples[reason]})" for reason, n in counts.reasons.items()]


def _documents(counts: Counts) -> str:
    cut = f"; {counts.clipped:,} were cut, {counts.split:,} split, {counts.left_out:,} tokens left out"
    return f"{counts.documents:,}{cut if counts.clipped or counts.split else ''}"


def _histogram(lengths: np.ndarray) -> list[str]:
    """Documents by length, in powers of two."""
    classes = np.bincount(np.ceil(np.log2(np.maximum(lengths, 1))).astype(int))
    used = range(int(np.flatnonzero(classes)[0]), len(classes))
    width, most = len(f"{2 ** used[-1]:,}"), int(classes.max())
    return [f"≤ {2**i:>{width},}  {'█' * -(-_BAR * int(classes[i]) // most):<{_BAR}} {classes[i]:,}" for i in used]


def _named(name: str, texts: list[str]) -> list[tuple[str, str]]:
    return [(name if i == 0 else "", text) for i, text in enumerate(texts)]


def _show(lines: list[tuple[str, str]]) -> None:
    for name, text in lines:
        print(f"{name:<12} {text}")
