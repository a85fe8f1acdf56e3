"""docs/extending.md as written: a drafter, a store, an engine and a tracker from outside the repository."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.runs import ROOT

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
OTHERS = """
import json

from data_pipelines.engines import ENGINES
from data_pipelines.engines.transformers import TransformersEngine
from data_pipelines.stores import STORES
from data_pipelines.stores.filesystem import FilesystemStore
from trainer.tracking import TRACKERS


@STORES.register("shelf")
def shelf(config, role):
    print("a shelf for the", role, flush=True)
    return FilesystemStore(config.options["folder"])


@ENGINES.register("loud")
class Loud(TransformersEngine):
    def __init__(self, target, spec, word):
        print("engine:", word, flush=True)
        super().__init__(target, spec)


@TRACKERS.register("lines")
class Lines:
    def __init__(self, config, run_dir, run_config):
        self.file = open(config.options["file"], "a")

    def log(self, row):
        self.file.write(json.dumps([row["step"], row["loss"]]) + "\\n")

    def close(self):
        self.file.close()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A person's folder: the page's files, and a conf.py of another project."""
    for name, text in re.findall(r"```(?:python|yaml)\n# (\w+\.\w+)\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / name).write_text(text)
    (tmp_path / "conf.py").write_text("raise SystemExit('a file of the person was imported')")
    return tmp_path


def draftsmith(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [str(Path(sys.executable).with_name("draftsmith")), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_the_pages_drafter_is_trained_through_the_stream_planned_judged_and_exported(folder: Path) -> None:
    done = draftsmith(folder, "run", "ci_mlp.yaml", "run_dir=run", "evaluate.max_prompts=8")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["drafter"] == "mlp" and summary["producers"] == 2 and summary["lossless"]
    judgements = [json.loads((folder / "run/evaluation" / f"{when}.json").read_text()) for when in ("before", "after")]
    lengths = [judgement["overall"]["acceptance_length"] for judgement in judgements]
    assert lengths[1] > lengths[0] + 0.2, lengths
    judged = draftsmith(
        folder,
        "judge",
        "--plugins",
        "mlp_speculator",
        "--target",
        "tiny",
        "--draft",
        "run",
        "--max-prompts",
        "8",
        "--json",
    )
    assert judged.returncode == 0, judged.stderr
    again = json.loads(judged.stdout[judged.stdout.index("{") :])
    assert again["lossless"] and again["drafter"] == "mlp"
    planned = draftsmith(folder, "plan", "ci_mlp.yaml")
    assert planned.returncode == 0 and "mlp" in planned.stdout, planned.stderr
    resumed = draftsmith(folder, "evaluate", "run", "evaluate.max_prompts=4")
    assert resumed.returncode == 0, resumed.stderr


def test_a_store_an_engine_and_a_tracker_of_ones_own(folder: Path) -> None:
    (folder / "mine.py").write_text(OTHERS)
    done = draftsmith(
        folder, "run", "ci_eagle3", "plugins=[mine]", "run_dir=run", "max_steps=4", "evaluate=none", "target.engine=loud",
        "+target.options.word=hello", "store.name=shelf", f"+store.options.folder={folder / 'objects'}",
        "tracker.name=lines", f"+tracker.options.file={folder / 'lines'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    logged = [json.loads(line) for line in (folder / "lines").read_text().splitlines()]
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert logged == [[row["step"], row["loss"]] for row in metrics] and len(logged) == 4
    said = (folder / "run" / "logs" / "producer-0.log").read_text()
    assert "engine: hello" in said and "a shelf for the producer" in said
    assert "a shelf for the consumer" in (folder / "run" / "logs" / "trainer.log").read_text()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "plugins=[mine] cannot be imported: ModuleNotFoundError: No module named 'mine'"),
        ("x = (", "mine.py:1"),
        ("import json\njson.nothing", "mine.py:2"),
        (
            "from trainer.drafters import DRAFTERS\n\n\n@DRAFTERS.register('mtp')\nclass Other: ...\n",
            "plugins=[mine]: drafter=mtp is trainer.drafters.mtp.MTP already",
        ),
    ],
)
def test_what_is_wrong_with_a_plugin_is_said_in_words(folder: Path, content: str | None, says: str) -> None:
    if content:
        (folder / "mine.py").write_text(content)
    done = draftsmith(folder, "run", "ci_eagle3", "plugins=[mine]", "run_dir=run")
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
