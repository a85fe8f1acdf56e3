"""The volume of data that are on this machine: a sample of the rows is prepared as a run would, the others are counted."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from data_pipelines.conversations.prepare import prepare
from data_pipelines.conversations.rows import read_rows
from data_pipelines.engines import resolve_target
from data_pipelines.errors import UserError
from trainer.config import RunConfig

from .assumptions import Assumption
from .volume import Volume

SAMPLE = 1000  # rows
SUPERVISED = Assumption("share of the tokens that is trained on", 0.6, "a guess for chats: --supervised gives another")
PROMPT = Assumption("tokens of a prompt that the target has yet to answer", 40, "measured here on builtin:prompts")
ANSWER_SHARE = Assumption(
    "share of max_new_tokens that an answer takes", 0.6, "measured here on the tiny target's answers"
)


def measured_volume(config: RunConfig, samples: float | None) -> Volume:
    """samples: documents, if they are known otherwise.

    Raises UserError when the data or the target's tokenizer are not on this machine.
    """
    data = config.data
    if data.path.startswith("hf:"):
        raise UserError(f"data.path={data.path} is not on this machine", fix="--samples 600e3 --mean-tokens 1000")
    rows = round(samples) if samples else sum(1 for _ in read_rows(data.path, data.max_rows, config.seed))
    if data.regenerate.mode == "always":
        answer = ANSWER_SHARE.value * data.regenerate.max_new_tokens
        return Volume(rows, PROMPT.value + answer, answer / (PROMPT.value + answer))
    target = resolve_target(_local(config.target))
    few = replace(data, max_rows=min(rows, data.max_rows or SAMPLE, SAMPLE))
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(few, target.load_tokenizer(), Path(folder), config.seed)
    counts, lengths = prepared.counts, prepared.documents.lengths
    return Volume(
        samples=round(rows * counts.documents / counts.rows),
        mean_tokens=counts.tokens / counts.documents,
        supervised=counts.supervised / counts.tokens,
        spread=float(np.std(lengths) / np.mean(lengths)),
        measured=True,
    )


def _local(target):
    if target.kind == "hf" and not Path(target.path).expanduser().is_dir():
        raise UserError(
            f"the tokenizer of {target.path} is not on this machine, and the data cannot be counted without it",
            fix="--samples 600e3 --mean-tokens 1000, or target.path=<folder>",
        )
    return target
