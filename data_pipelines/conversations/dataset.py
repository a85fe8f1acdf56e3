"""A run's training data: rows, answered by the target first if the config says so, as tokenised documents."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from ..caches import build_once, user_cache
from ..engines.targets import Target
from .config import DataConfig
from .prepare import Prepared, prepare
from .regenerate import regenerate
from .rows import read_rows

ANSWERS_FILE = "answers.jsonl"


def training_data(
    config: DataConfig, target: Target, tokenizer: PreTrainedTokenizerBase, run_dir: Path, seed: int
) -> Prepared:
    """The documents of a run. With `regenerate.mode=always` the rows' prompts are answered by the target, once: the answers
    are kept in the user's cache, keyed by the target, the rows and the options."""
    rows = list(read_rows(config.path, config.max_rows, seed))
    if config.regenerate.mode != "always":
        return prepare(config, tokenizer, run_dir, seed, rows=rows)
    options = config.regenerate
    determined_by = [target.fingerprint, options.max_new_tokens, [[row.origin, row.data] for row in rows]]
    key = hashlib.sha256(json.dumps(determined_by, sort_keys=True, default=str).encode()).hexdigest()[:32]

    def answer(folder: Path) -> None:
        model = target.load_model(torch.float32)  # near ties fall the same way on every machine more often than in bf16
        out = folder / ANSWERS_FILE
        regenerate(rows, model, tokenizer, out, max_new_tokens=options.max_new_tokens, batch_size=options.batch_size)

    folder = build_once(user_cache() / "answers" / key, answer)
    return prepare(config, tokenizer, run_dir, seed, rows=list(read_rows(str(folder / ANSWERS_FILE))))
