"""A run's training data: rows, answered by the target first if the config says so, as tokenised documents."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from ..caches import user_cache
from ..engines.targets import Target
from .config import DataConfig
from .prepare import Prepared, prepare
from .regenerate import regenerate
from .rows import read_rows


def training_data(
    config: DataConfig, target: Target, tokenizer: PreTrainedTokenizerBase, run_dir: Path, seed: int
) -> Prepared:
    """The documents of a run. With `regenerate.mode=always` the rows' prompts are answered by the target, once: the
    answers are kept in the user's cache, keyed by the target, the rows and the options."""
    rows = list(read_rows(config.path, config.max_rows, seed))
    if config.regenerate.mode != "always":
        return prepare(config, tokenizer, run_dir, seed, rows=rows)
    options = config.regenerate
    determined_by = [target.fingerprint, options.max_new_tokens, [[row.origin, row.data] for row in rows]]
    key = hashlib.sha256(json.dumps(determined_by, sort_keys=True, default=str).encode()).hexdigest()[:32]

    out = user_cache() / "answers" / f"{key}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(out.with_suffix(".lock")):  # of concurrent processes one asks the target; a killed one is resumed
        if not out.exists():
            model = target.load_model(torch.float32)  # near ties fall the same way more often than in bf16
            regenerate(
                rows, model, tokenizer, out, max_new_tokens=options.max_new_tokens, batch_size=options.batch_size
            )
    return prepare(config, tokenizer, run_dir, seed, rows=list(read_rows(str(out))))
