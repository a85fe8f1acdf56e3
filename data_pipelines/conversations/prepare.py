"""Rows → documents: cleaned, rendered, masked, cut, and every row accounted for.

The result is kept in the user's cache under a hash of all that determines it: the rows, the tokenizer with its chat
template, the options, and this code's version. Nothing else can be hit.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedTokenizerBase

from ..caches import build_once, user_cache
from ..errors import UserError
from ..packing import Document
from .config import DataConfig
from .quarantine import Quarantine, describe
from .rendering import Unrenderable, check_template, render_documents
from .rows import Row, conversation, read_rows

VERSION = 1  # raised whenever the same rows would become other documents


@dataclass
class Counts:
    """What became of the rows: trained + quarantined = rows.

    documents: more than `trained` where a template needs one per answer. clipped: documents cut at the maximum.
    tokens, supervised: in all documents, and those of them that are trained on. reasons: quarantined rows by reason.
    repairs: rows by the rule that changed them. examples: the first row's origin for each reason.
    """

    rows: int = 0
    trained: int = 0
    quarantined: int = 0
    documents: int = 0
    clipped: int = 0
    tokens: int = 0
    supervised: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    repairs: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)


@dataclass
class Prepared:
    """documents in the rows' order. fingerprint: of their token ids and masks."""

    documents: list[Document]
    counts: Counts
    fingerprint: str


def prepare(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    run_dir: Path,
    seed: int = 0,
    rows: Iterable[Row] | None = None,
) -> Prepared:
    """The documents that `config` names, or those of `rows`; writes `run_dir/quarantine.jsonl` each time.

    Safe under concurrent processes: one tokenises, the others wait and read.
    Raises UserError when the data does not exist, when more than data.max_quarantined_fraction of the rows are
    quarantined, or when nothing is left to train on.
    """
    check_template(tokenizer)
    given = list(rows) if rows is not None else None

    def read() -> Iterator[Row]:
        return iter(given) if given is not None else read_rows(config.path, config.max_rows, seed)

    folder = user_cache() / "documents" / _key(config, tokenizer, read())
    build_once(folder, lambda out: _build(out, config, tokenizer, read))
    prepared = _load(folder)
    run_dir.mkdir(parents=True, exist_ok=True)
    temporary = run_dir / f".quarantine.{os.getpid()}.tmp"
    shutil.copyfile(folder / "quarantine.jsonl", temporary)
    temporary.replace(run_dir / "quarantine.jsonl")
    _check(prepared.counts, config, run_dir)
    return prepared


def _build(
    out: Path, config: DataConfig, tokenizer: PreTrainedTokenizerBase, read: Callable[[], Iterator[Row]]
) -> None:
    counts, reasons, repairs = Counts(), Counter(), Counter()
    ids, masks, lengths, origins = [], [], [], []
    with Quarantine(out / "quarantine.jsonl") as quarantine:
        for row in read():
            counts.rows += 1
            try:
                talk = conversation(row)
                documents = render_documents(tokenizer, talk.messages, talk.truncated)
                documents, clipped = _fit(documents, config)
            except Unrenderable as error:
                quarantine.add(row.origin, str(error), row.data)
                continue
            counts.trained += 1
            counts.clipped += clipped
            repairs.update(talk.repairs)
            for document_ids, document_mask in documents:
                ids.append(np.asarray(document_ids, dtype=np.int32))
                masks.append(np.asarray(document_mask, dtype=np.bool_))
                lengths.append(len(document_ids))
                origins.append(row.origin)
        reasons, counts.examples = quarantine.counts, quarantine.examples
    counts.quarantined = sum(reasons.values())
    counts.reasons, counts.repairs = dict(reasons.most_common()), dict(repairs.most_common())
    counts.documents, counts.tokens = len(lengths), sum(lengths)
    counts.supervised = int(sum(m.sum() for m in masks))
    arrays = {
        "input_ids": np.concatenate([np.zeros(0, np.int32), *ids]),
        "loss_mask": np.concatenate([np.zeros(0, np.bool_), *masks]),
        "lengths": np.asarray(lengths, dtype=np.int64),
    }
    save_file(arrays, out / "documents.safetensors")
    description = {"counts": asdict(counts), "origins": origins}
    (out / "documents.json").write_text(json.dumps(description, ensure_ascii=False), encoding="utf-8")


def _fit(
    documents: list[tuple[list[int], list[bool]]], config: DataConfig
) -> tuple[list[tuple[list[int], list[bool]]], int]:
    """(the row's documents cut to data.max_document_tokens, how many were cut).

    A cut document has no end of turn that it did not reach; one in which nothing is left to train on is left out.

    Raises Unrenderable when long documents are to be quarantined, or none is left.
    """
    most, kept, clipped = config.max_document_tokens, [], 0
    for ids, mask in documents:
        if len(ids) > most:
            if config.long_documents == "quarantine":
                raise Unrenderable(f"longer than data.max_document_tokens={most}")
            ids, mask, clipped = ids[:most], mask[:most], clipped + 1
        if any(mask):
            kept.append((ids, mask))
    if not kept:
        raise Unrenderable(f"no answer within the first data.max_document_tokens={most} tokens")
    return kept, clipped


def _load(folder: Path) -> Prepared:
    arrays = load_file(folder / "documents.safetensors")
    description = json.loads((folder / "documents.json").read_text(encoding="utf-8"))
    ends = np.cumsum(arrays["lengths"])
    documents = [
        Document(arrays["input_ids"][end - n : end], arrays["loss_mask"][end - n : end], origin)
        for n, end, origin in zip(arrays["lengths"], ends, description["origins"])
    ]
    digest = hashlib.sha256()
    for name in ("lengths", "input_ids", "loss_mask"):
        digest.update(arrays[name].tobytes())
    return Prepared(documents, Counts(**description["counts"]), digest.hexdigest()[:16])


def _check(counts: Counts, config: DataConfig, run_dir: Path) -> None:
    where = f"data.path={config.path}; every row with its reason: {run_dir / 'quarantine.jsonl'}"
    if counts.rows == 0:
        raise UserError("the data has no rows", where=where)
    if counts.quarantined > config.max_quarantined_fraction * counts.rows or not counts.supervised:
        reasons = describe(counts.reasons, counts.examples)
        unanswered = counts.reasons.get("there is no assistant turn", 0) > counts.rows // 2
        nothing = "" if counts.supervised else "no token to train on: "
        raise UserError(
            f"{nothing}{counts.quarantined} of {counts.rows} rows are quarantined: {reasons}",
            where=where,
            fix="have the target answer the prompts first: data.regenerate.mode=always, or draftsmith regenerate"
            if unanswered
            else "repair the rows, or raise data.max_quarantined_fraction to go on with the others",
        )


def _key(config: DataConfig, tokenizer: PreTrainedTokenizerBase, rows: Iterator[Row]) -> str:
    digest = hashlib.sha256()

    def add(*parts: object) -> None:
        digest.update((json.dumps(parts, sort_keys=True, default=str) + "\n").encode())

    add("version", VERSION, config.max_document_tokens, config.long_documents)
    if tokenizer.is_fast:
        # Padding and truncation are the state of the last call, not the tokenizer's nature.
        add({**json.loads(tokenizer.backend_tokenizer.to_str()), "padding": None, "truncation": None})
    else:
        add(type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()))
    add(tokenizer.chat_template, sorted((str(k), str(v)) for k, v in tokenizer.special_tokens_map.items()))
    for row in rows:
        add(row.origin, row.problem, row.data)
    return digest.hexdigest()[:32]
