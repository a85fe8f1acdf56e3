"""Blocks of rows → shards of documents, over several processes, each shard a file: an interrupted run goes on from them.

Shards are numbered in the rows' order and hold the same whoever made them, so that nothing depends on the number of
processes. The processes are started afresh rather than forked: a tokenizer's threads do not survive a fork.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, fields
from itertools import chain, islice
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerBase

from ..documents import Documents, split_origin
from ..errors import UserError
from .config import DataConfig
from .quarantine import Quarantine, Unrenderable
from .readers import Block
from .row_documents import row_documents

_FEW = 4  # blocks that one process has rendered before others have started


@dataclass
class Counts:
    """What became of the rows: trained + quarantined = rows.

    documents: more than `trained` where a row gives several. tokens, supervised: in all documents, and those of them
    that are trained on. clipped, split: documents longer than allowed that were cut at the limit, or into pieces;
    left_out: the tokens of such documents that are in none. shapes: rows by shape. repairs: rows by the rule that
    changed them. reasons: quarantined rows by reason. examples: the first row's origin for each reason.
    """

    rows: int = 0
    trained: int = 0
    quarantined: int = 0
    documents: int = 0
    clipped: int = 0
    split: int = 0
    left_out: int = 0
    tokens: int = 0
    supervised: int = 0
    shapes: dict[str, int] = field(default_factory=dict)
    repairs: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, other: Counts) -> None:
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if f.name == "examples":
                self.examples = {**theirs, **mine}
            elif isinstance(mine, dict):
                setattr(self, f.name, {key: mine.get(key, 0) + theirs.get(key, 0) for key in {**mine, **theirs}})
            else:
                setattr(self, f.name, mine + theirs)


def render_shards(
    blocks: Iterator[Block], folder: Path, tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> Generator[tuple[Block, Counts], None, None]:
    """Writes shard after shard into `folder`, skipping those that are there; yields what became of each, in order."""
    first = list(islice(blocks, _FEW))
    jobs = enumerate(chain(first, blocks))
    workers = config.workers or (_cpus() if len(first) == _FEW else 1)
    if workers == 1:
        for index, block in jobs:
            yield block, _shard(folder, index, block, tokenizer, config)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _begin_worker, (tokenizer, config)) as pool:
        waiting: deque = deque()
        try:
            for index, block in jobs:
                waiting.append((block, pool.submit(_shard_in_worker, folder, index, block)))
                if len(waiting) > 2 * workers:  # blocks travel with their rows: only so many are held
                    done, future = waiting.popleft()
                    yield done, future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        except BrokenProcessPool as error:
            raise UserError(
                "a process that rendered rows was killed",
                where=f"data.workers={workers}",
                fix="the kernel kills what takes too much memory: use fewer data.workers; what was done is kept",
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _cpus() -> int:
    """Those that this process may use; where the system does not say, all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_shard(folder: Path, index: int) -> Documents:
    arrays, names = {}, []
    with safe_open(_path(folder, index), "np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        names = json.loads(file.metadata()["files"])
    return Documents(**arrays, files=names)


def quarantined_rows(folder: Path, index: int) -> Path:
    """The file of the rows of a shard that are in no document."""
    return folder / f"{index:06}.jsonl"


def _path(folder: Path, index: int) -> Path:
    return folder / f"{index:06}.safetensors"


def _shard(folder: Path, index: int, block: Block, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Counts:
    path = _path(folder, index)
    if path.exists():
        with safe_open(path, "np") as file:
            return Counts(**json.loads(file.metadata()["counts"]))
    counts, shapes, repairs, parts, origins = Counts(), Counter(), Counter(), [], []
    refused = folder / f".{index:06}.{os.getpid()}.jsonl"
    with Quarantine(refused) as quarantine:
        for row in block.rows():
            counts.rows += 1
            try:
                made = row_documents(row, tokenizer, config)
            except Unrenderable as error:
                quarantine.add(row.origin, str(error), row.data)
                continue
            except Exception as error:  # whatever a row can provoke is about this row; the others go on
                quarantine.add(row.origin, f"an unforeseen fault: {type(error).__name__}: {error}", row.data)
                continue
            counts.trained += 1
            counts.clipped += made.clipped
            counts.split += made.split
            counts.left_out += made.left_out
            shapes[made.shape] += 1
            repairs.update(made.repairs)
            parts += made.documents
            origins += [row.origin] * len(made.documents)
    counts.shapes, counts.repairs = dict(shapes), dict(repairs)
    counts.reasons, counts.examples = dict(quarantine.counts), dict(quarantine.examples)
    counts.quarantined = sum(counts.reasons.values())
    files: dict[str, int] = {}
    places = [split_origin(origin) for origin in origins]
    arrays = {
        "input_ids": np.fromiter(chain.from_iterable(ids for ids, _ in parts), np.int32),
        "loss_mask": np.fromiter(chain.from_iterable(mask for _, mask in parts), np.bool_),
        "lengths": np.array([len(ids) for ids, _ in parts], np.int32),
        "names": np.array([files.setdefault(name, len(files)) for name, _ in places], np.int32),
        "numbers": np.array([number for _, number in places], np.int64),
    }
    counts.documents, counts.tokens = len(parts), len(arrays["input_ids"])
    counts.supervised = int(arrays["loss_mask"].sum())
    os.replace(refused, quarantined_rows(folder, index))
    temporary = folder / f".{index:06}.{os.getpid()}.tmp"
    save_file(arrays, temporary, {"counts": json.dumps(asdict(counts)), "files": json.dumps(list(files))})
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)  # last: a shard that has its name is whole
    return counts


_worker: tuple[PreTrainedTokenizerBase, DataConfig] | None = None


def _begin_worker(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
    global _worker
    _worker = tokenizer, config
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _shard_in_worker(folder: Path, index: int, block: Block) -> Counts:
    assert _worker is not None
    return _shard(folder, index, block, *_worker)
