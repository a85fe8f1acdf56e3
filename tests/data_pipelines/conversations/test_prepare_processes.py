"""Real processes prepare the same data at once, and are killed: nothing is done twice, lost, mixed up or left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from data_pipelines.conversations import shards
from data_pipelines.conversations.config import DataConfig
from data_pipelines.conversations.prepare import Prepared, prepare
from data_pipelines.conversations.readers import BLOCK_ROWS

pytestmark = pytest.mark.faults

SCRIPT = """
import sys
from pathlib import Path
from transformers import AutoTokenizer
from data_pipelines.conversations.config import DataConfig
from data_pipelines.conversations.prepare import prepare

if __name__ == "__main__":
    path, tokenizer, run_dir, workers = sys.argv[1:]
    prepared = prepare(DataConfig(path=path, workers=int(workers)), AutoTokenizer.from_pretrained(tokenizer), Path(run_dir))
    print(prepared.fingerprint, prepared.counts.rows)
"""
ROWS = BLOCK_ROWS * 9 + 100


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """Rows of which one in seven is broken."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    with file.open("w") as out:
        for i in range(ROWS):
            turns = [{"role": "user", "content": f"Count {i}"}, {"role": "assistant", "content": f"one two {i}"}]
            out.write("{broken\n" if i % 7 == 0 else json.dumps({"messages": turns * (1 + i % 2)}) + "\n")
    return file


@pytest.fixture(scope="module")
def tokenizer_folder(tiny_target, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_target.load_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "draftsmith" / "documents"


@pytest.fixture(scope="module")
def expected(rows, tokenizer_folder, tmp_path_factory) -> Prepared:
    """By one process, undisturbed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("undisturbed")))
        return run_here(rows, tokenizer_folder, tmp_path_factory.mktemp("run"), workers=1)


def run_here(rows: Path, tokenizer_folder: Path, run_dir: Path, workers: int) -> Prepared:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    return prepare(DataConfig(path=str(rows), workers=workers), tokenizer, run_dir)


def start(tmp_path: Path, rows: Path, tokenizer_folder: Path, name: str, workers: int = 2) -> subprocess.Popen:
    script = tmp_path / "prepare_rows.py"
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(script), str(rows), str(tokenizer_folder), str(tmp_path / name), str(workers)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


def same(one: Prepared, other: Prepared) -> bool:
    return (
        one.counts == other.counts
        and one.fingerprint == other.fingerprint
        and [d.origin for d in one.documents] == [d.origin for d in other.documents]
        and np.array_equal(one.documents.input_ids, other.documents.input_ids)
    )


def test_several_workers_give_what_one_gives(tmp_path, rows, tokenizer_folder, cache, expected):
    prepared = run_here(rows, tokenizer_folder, tmp_path / "run", workers=3)
    assert same(prepared, expected) and prepared.counts.rows == ROWS
    quarantined = [json.loads(line) for line in (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()]
    assert [q["origin"] for q in quarantined] == [f"{rows}:{i}" for i in range(1, ROWS + 1, 7)]


def test_killed_midway_it_goes_on_from_what_was_done(tmp_path, rows, tokenizer_folder, cache, expected, monkeypatch):
    process = start(tmp_path, rows, tokenizer_folder, "killed")
    wait_for(lambda: len(list(cache.glob(".*.partial/shards/0*.safetensors"))) >= 2)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    psutil.wait_procs(children, timeout=60)
    assert not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]
    done = len(list(cache.glob(".*.partial/shards/0*.safetensors")))
    assert 2 <= done < 10 and not [p for p in cache.iterdir() if p.is_dir() and not p.name.startswith(".")]

    rendered = []
    render = shards.row_documents
    monkeypatch.setattr(
        shards, "row_documents", lambda row, *rest: (rendered.append(row.origin), render(row, *rest))[1]
    )
    prepared = run_here(rows, tokenizer_folder, tmp_path / "run", workers=1)
    assert same(prepared, expected)
    assert len(rendered) == len(set(rendered)) == ROWS - done * BLOCK_ROWS


def test_of_concurrent_processes_one_renders_and_all_agree(tmp_path, rows, tokenizer_folder, cache, expected):
    processes = [start(tmp_path, rows, tokenizer_folder, f"run{i}", workers=1 + i % 2) for i in range(3)]
    first = list(cache.parent.glob("documents/.*.partial/shards/0*.safetensors"))
    assert not first
    wait_for(lambda: list(cache.glob(".*.partial/shards/0*.safetensors")))
    processes[0].kill()  # whether it rendered or waited
    outputs = [p.communicate(timeout=300)[0].split() for p in processes]
    assert outputs[1] == outputs[2] == [expected.fingerprint, str(ROWS)]
    assert [p.name for p in cache.iterdir() if p.is_dir()] == [
        p.name.removesuffix(".lock") for p in cache.glob("*.lock")
    ]


def test_a_worker_that_is_killed_stops_the_run_with_a_reason(tmp_path, rows, tokenizer_folder, cache, expected):
    process = start(tmp_path, rows, tokenizer_folder, "run")

    def workers() -> list[psutil.Process]:
        children = psutil.Process(process.pid).children(recursive=True)
        return [c for c in children if "spawn_main" in " ".join(c.cmdline())]

    wait_for(lambda: list(cache.glob(".*.partial/shards/0*.safetensors")))
    workers()[0].kill()
    assert process.wait(timeout=120) != 0
    assert same(run_here(rows, tokenizer_folder, tmp_path / "again", workers=2), expected)
