"""Rows → documents at scale, beside `datasets.map` with the same work: rows per second, and memory.

    python -m tests.benchmarks.data [--rows 1000000] [--workers 2] [--repeat 1]

Both read the same file of synthetic conversations, render it with the same function and leave token ids and masks on
disk; each run is a process of its own with empty caches, and the two take turns. Memory is what the processes of a run
hold together at most, without the pages of files that are mapped (`Anonymous` in the kernel's account).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data_pipelines.conversations.config import DataConfig
from data_pipelines.conversations.prepare import prepare
from data_pipelines.conversations.readers import Row
from data_pipelines.conversations.row_documents import row_documents

_WORDS = [
    "Please",
    "count",
    "the",
    "apples",
    "and",
    "dogs",
    "in",
    "a",
    "box",
    "then",
    "take",
    "out",
    "parts",
    "put",
    "them",
]
_QUIET = {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}


def with_prepare(path: str, tokenizer: PreTrainedTokenizerBase, workers: int, out: Path) -> tuple[int, int]:
    counts = prepare(DataConfig(path=path, workers=workers), tokenizer, out).counts
    return counts.rows, counts.tokens


def with_datasets(path: str, tokenizer: PreTrainedTokenizerBase, workers: int, out: Path) -> tuple[int, int]:
    import datasets

    config = DataConfig(path=path)

    def render(data: dict, index: int) -> dict:
        ((ids, mask),) = row_documents(Row(data, f"{path}:{index}"), tokenizer, config).documents
        return {"input_ids": ids, "loss_mask": mask}

    rows = datasets.load_dataset("json", data_files=path, split="train", cache_dir=str(out))
    done = rows.map(render, with_indices=True, num_proc=workers, remove_columns=rows.column_names)
    tokens = sum(sum(map(len, batch["input_ids"])) for batch in done.iter(10_000))
    return len(done), tokens


WAYS = {"prepare": with_prepare, "datasets.map": with_datasets}


def write_rows(path: Path, rows: int) -> None:
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(rows):
            asked, said = (" ".join(draw.choices(_WORDS, k=draw.randint(4, 12))) for _ in range(2))
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            file.write(json.dumps({"messages": turns}) + "\n")


def held_by(process: psutil.Process) -> int:
    """Bytes that a process and its children hold."""
    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            text = Path(f"/proc/{member.pid}/smaps_rollup").read_text()
        except OSError:  # it has ended meanwhile
            continue
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Anonymous:")) * 1024
    return total


def measure(way: str, path: Path, tokenizer: Path, workers: int, folder: Path) -> None:
    command = [sys.executable, "-m", "tests.benchmarks.data", "--one", way, str(path), str(tokenizer), str(workers)]
    with tempfile.TemporaryDirectory(dir=folder) as caches:
        before = os.times()
        env = {**os.environ, **_QUIET, "XDG_CACHE_HOME": caches, "HF_HOME": caches}
        process = psutil.Popen([*command, caches], env=env, stdout=subprocess.PIPE, text=True)
        most = 0
        while process.poll() is None:
            most = max(most, held_by(process))
            time.sleep(0.5)
        if process.returncode:
            raise SystemExit(f"{way} ended with status {process.returncode}")
        after = os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        result = json.loads(process.stdout.read().splitlines()[-1])
    rate = result["rows"] / result["seconds"]
    print(
        f"{way:<13} {result['rows']:>9,} rows  {result['tokens']:>11,} tokens  {result['seconds']:>7.1f} s"
        f"  {cpu:>7.1f} s of CPU  {rate:>7,.0f} rows/s  {most / 2**20:>7,.0f} MiB at most",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        way, path, tokenizer, workers, out = arguments.one
        loaded, start = AutoTokenizer.from_pretrained(tokenizer), time.perf_counter()
        rows, tokens = WAYS[way](path, loaded, int(workers), Path(out))
        print(json.dumps({"rows": rows, "tokens": tokens, "seconds": time.perf_counter() - start}))
        return
    from data_pipelines.engines.targets import TargetConfig, resolve_target  # with torch, which no run here needs

    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path, tokenizer = Path(folder) / "rows.jsonl", Path(folder) / "tokenizer"
        write_rows(path, arguments.rows)
        resolve_target(TargetConfig(kind="tiny")).load_tokenizer().save_pretrained(tokenizer)
        for _ in range(arguments.repeat):
            for way in WAYS:
                measure(way, path, tokenizer, arguments.workers, Path(folder))


if __name__ == "__main__":
    main()
