"""Rows → documents: read, rendered, masked, cut, and every row accounted for.

The result is kept in the user's cache under a hash of all that determines it: the content of the files, the tokenizer
with its chat template, the options, this code and the libraries that it renders with. Nothing else can be hit. Neither
rows nor documents are held in memory: rows pass in blocks, documents lie in files that are mapped where they are read.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ..caches import build_once, user_cache
from ..documents import Documents, DocumentWriter
from ..errors import UserError
from ..run_folder import RunFolder
from .config import DataConfig
from .quarantine import describe
from .readers import Source, limited
from .rows import open_source
from .shards import Counts, quarantined_rows, read_shard, render_shards
from .templates import check_template

# What may differ without another document coming out; the files' content is hashed, and where they lie with them.
_FREE = ("path", "streaming", "pack_tokens", "max_quarantined_fraction", "workers", "regenerate")
_CODE = [*Path(__file__).parent.glob("*.py"), Path(__file__).parents[1] / "documents.py"]
_LIBRARIES = ("transformers", "tokenizers", "jinja2", "ijson", "pyarrow")


@dataclass
class Prepared:
    """documents in the rows' order. fingerprint: of their token ids and masks."""

    documents: Documents
    counts: Counts

    @property
    def fingerprint(self) -> str:
        return self.documents.fingerprint


def prepare(config: DataConfig, tokenizer: PreTrainedTokenizerBase, run_dir: Path, seed: int = 0) -> Prepared:
    """The documents that `config` names; writes `run_dir/quarantine.jsonl` each time.

    Safe under concurrent processes: one renders, the others wait and read. What a killed one has done is not done again.
    Raises UserError when the data does not exist, when more than data.max_quarantined_fraction of the rows are
    quarantined (as soon as that is clear), or when nothing is left to train on.
    """
    check_template(tokenizer)
    source = open_source(config.path, config.max_rows, seed, config.streaming)
    state = source.state()
    folder = user_cache() / "documents" / _key(config, tokenizer, source)

    def build(out: Path) -> None:
        counts = _render(out, source, tokenizer, config, run_dir)
        if source.state() != state:
            shutil.rmtree(out)
            raise UserError("the data changed while it was read", where=config.path, fix="run again when it is whole")
        _finish(out, counts)

    build_once(folder, build, resumable=True)
    counts = Counts(**json.loads((folder / "counts.json").read_text(encoding="utf-8")))
    _write_quarantine(run_dir, [folder / "quarantine.jsonl"])
    _check(counts, config, run_dir)
    return Prepared(Documents.load(folder), counts)


def _render(
    out: Path, source: Source, tokenizer: PreTrainedTokenizerBase, config: DataConfig, run_dir: Path
) -> list[Counts]:
    """Every block into a shard of `out`; returns what became of each."""
    total, shards, each = Counts(), out / "shards", []
    shards.mkdir(exist_ok=True)
    layout = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
    blocks = limited(source.blocks(), config.max_rows)
    with (
        closing(render_shards(blocks, shards, tokenizer, config)) as rendered,  # its processes end with an error, too
        tqdm(total=source.weight or None, desc="rows", leave=False, disable=None, bar_format=layout) as bar,
    ):
        for block, counts in rendered:
            total.add(counts)
            each.append(counts)
            bar.set_postfix_str(f"{total.rows:,} rows, {total.quarantined:,} quarantined", refresh=False)
            bar.update(block.weight)
            if _surely_more(total.quarantined, total.rows, config.max_quarantined_fraction):
                _write_quarantine(run_dir, [quarantined_rows(shards, i) for i in range(len(each))])
                _check(total, config, run_dir, so_far=True)
    return each


def _finish(out: Path, each: list[Counts]) -> None:
    """The shards, joined into one."""
    total, shards, writer = Counts(), out / "shards", DocumentWriter(out)
    for index, counts in enumerate(each):
        total.add(counts)
        writer.append(read_shard(shards, index))
    writer.close()
    _join(out / "quarantine.jsonl", [quarantined_rows(shards, i) for i in range(len(each))])
    for tally in ("shapes", "repairs", "reasons"):
        setattr(total, tally, dict(Counter(getattr(total, tally)).most_common()))
    (out / "counts.json").write_text(json.dumps(asdict(total), ensure_ascii=False), encoding="utf-8")
    shutil.rmtree(shards)


def _surely_more(hits: int, of: int, share: float) -> bool:
    """Whether, from the first `of` rows, the share among all rows can be taken to be larger than `share`.

    By Wilson's interval at four standard deviations: 1 in 30,000 where bad rows lie anywhere.
    """
    if of < 1000 or not hits:
        return False
    z2, p = 16.0, hits / of
    return (p + z2 / (2 * of) - sqrt(z2 * (p * (1 - p) / of + z2 / (4 * of * of)))) / (1 + z2 / of) > share


def _write_quarantine(run_dir: Path, parts: Iterable[Path]) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    temporary = run_dir / f".quarantine.{os.getpid()}.tmp"
    _join(temporary, parts)
    temporary.replace(RunFolder(run_dir).quarantine)


def _join(out: Path, parts: Iterable[Path]) -> None:
    with out.open("wb") as whole:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole)


def _check(counts: Counts, config: DataConfig, run_dir: Path, so_far: bool = False) -> None:
    where = f"data.path={config.path}; every row with its reason: {run_dir / 'quarantine.jsonl'}"
    if counts.rows == 0:
        raise UserError("the data has no rows", where=where)
    if counts.quarantined > config.max_quarantined_fraction * counts.rows or not counts.supervised:
        reasons = describe(counts.reasons, counts.examples)
        nothing = "" if counts.supervised else "no token to train on: "
        first = "the first " if so_far else ""
        raise UserError(
            f"{nothing}{counts.quarantined} of {first}{counts.rows} rows are quarantined: {reasons}",
            where=where,
            fix=_remedy(max(counts.reasons, key=counts.reasons.__getitem__, default="")),
        )


def _remedy(reason: str) -> str:
    """What to do about the most frequent reason."""
    if reason == "there is no assistant turn":
        return "have the target answer the prompts first: data.regenerate.mode=always, or draftsmith regenerate"
    if "data.max_document_tokens" in reason:
        return "raise data.max_document_tokens, or let data.too_long=split make several documents of a long one"
    return "repair the rows, or raise data.max_quarantined_fraction to go on with the others"


def _key(config: DataConfig, tokenizer: PreTrainedTokenizerBase, source: Source) -> str:
    digest = hashlib.sha256()

    def add(*parts: object) -> None:
        digest.update((json.dumps(parts, sort_keys=True, default=str) + "\n").encode())

    add({name: value for name, value in asdict(config).items() if name not in _FREE})
    add({name: importlib.metadata.version(name) for name in _LIBRARIES})
    add([path.read_text(encoding="utf-8") for path in sorted(_CODE)])
    if tokenizer.is_fast:
        # Padding and truncation are the state of the last call, not the tokenizer's nature.
        add({**json.loads(tokenizer.backend_tokenizer.to_str()), "padding": None, "truncation": None})
    else:
        add(type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()))
    add(tokenizer.chat_template, sorted((str(k), str(v)) for k, v in tokenizer.special_tokens_map.items()))
    source.digest(digest.update)
    return digest.hexdigest()[:32]
