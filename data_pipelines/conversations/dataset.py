"""A run's training data: rows, answered by the target first if the config says so, as tokenised documents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from ..caches import user_cache
from ..engines.targets import Target
from .chat_server import ChatServer
from .config import DataConfig, RegenerateConfig
from .greedy import Greedy
from .prepare import Prepared, prepare
from .regenerate import Answerer, Regenerated, Rows, answers_key, regenerate
from .rows import read_rows


def training_data(
    config: DataConfig, target: Target, tokenizer: PreTrainedTokenizerBase, run_dir: Path, seed: int
) -> Prepared:
    """The documents of a run. With `regenerate.mode=always` the rows' prompts are answered by the target, once: the
    answers are kept in the user's cache, keyed by the target, the rows and the options."""
    if config.regenerate.mode != "always":
        return prepare(config, tokenizer, run_dir, seed)
    answerer = _answerer(config.regenerate, target, seed)
    key, _ = answers_key(_rows(config, seed), answerer, config.format, config.pair)
    out = user_cache() / "answers" / f"{key}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(out.with_suffix(".lock")):  # of concurrent processes one asks the target; a killed one is resumed
        if not out.exists():
            regenerate(_rows(config, seed), answerer, out, shape=config.format, pair=config.pair)
    return prepare(replace(config, path=str(out), max_rows=0, format="auto", pair=""), tokenizer, run_dir, seed)


def regenerate_file(config: DataConfig, target: Target, out: Path, seed: int) -> Regenerated:
    """The rows that the config names, answered by the target, as a file of rows."""
    answerer = _answerer(config.regenerate, target, seed)
    return regenerate(_rows(config, seed), answerer, out, shape=config.format, pair=config.pair)


def _answerer(options: RegenerateConfig, target: Target, seed: int) -> Answerer:
    if options.server:
        return ChatServer(options, target, seed)
    return Greedy(target, max_new_tokens=options.max_new_tokens, batch_size=options.batch_size)


def _rows(config: DataConfig, seed: int) -> Rows:
    return lambda: read_rows(config.path, config.max_rows, seed, config.streaming)
