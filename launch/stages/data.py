"""The data stage: what the run trains on, in words and numbers, and whether shipped answers are the target's own."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from data_pipelines.conversations.dataset import regenerate_file
from data_pipelines.conversations.greedy import agreement
from data_pipelines.conversations.regenerate import Regenerated
from data_pipelines.conversations.rows import read_rows
from data_pipelines.conversations.vocabulary import coverage
from data_pipelines.engines import Target
from trainer.config import RunConfig
from trainer.setup import RunSetup

from .records import remembered


def describe_target(target: Target) -> str:
    config = target.config
    shape = f"{config.num_hidden_layers} layers of {config.hidden_size}, vocabulary {config.vocab_size:,}"
    return f"{target.name}: {shape}"


def describe(setup: RunSetup) -> str:
    counts = setup.prepared.counts
    text = (
        f"{counts.documents:,} documents, {counts.tokens:,} tokens, {counts.supervised:,} trained on;"
        f" {len(setup.plan.packs):,} packs, {setup.total_steps:,} steps"
    )
    text = f"{text}; {counts.quarantined:,} rows quarantined" if counts.quarantined else text
    return f"{text}; the drafter {setup.begins}" if setup.begins else text


def counts(setup: RunSetup) -> dict[str, Any]:
    """What the report says of the data."""
    return {
        "path": setup.config.data.path,
        **{name: value for name, value in asdict(setup.prepared.counts).items() if name != "examples"},
        "packs": len(setup.plan.packs),
        "epochs": setup.config.epochs,
        "padding_share": setup.plan.packs.padding_share,
        "draft_vocabulary": vocabulary(setup),
    }


def vocabulary(setup: RunSetup) -> str:
    whole = setup.target.config.vocab_size
    if setup.kept is None:
        return f"all {whole:,} tokens"
    covered = coverage(setup.prepared.documents, setup.kept, whole)
    return f"{len(setup.kept):,} of {whole:,} tokens cover {covered:.2%} of the labels"


def sample_agreement(setup: RunSetup) -> dict[str, int]:
    """The target answers some of the rows again: {"same", "of"}."""
    config = setup.config.data

    def ask() -> dict[str, int]:
        result = agreement(
            list(read_rows(config.path, config.max_rows, setup.config.seed)),
            setup.target.load_model(torch.float32),
            setup.target.load_tokenizer(),
            config.regenerate.sample,
            max_new_tokens=config.regenerate.max_new_tokens,
            batch_size=config.regenerate.batch_size,
        )
        return {"same": result.same, "of": result.total}

    depends_on = [setup.target.fingerprint, setup.prepared.fingerprint, asdict(config.regenerate)]
    return remembered(setup.run_dir, "agreement", depends_on, ask)


def regenerate_rows(config: RunConfig, target: Target, out: Path) -> Regenerated:
    """`draftsmith regenerate`: the recipe's rows, answered by its target, as a file of rows."""
    return regenerate_file(config.data, target, out, config.seed)
