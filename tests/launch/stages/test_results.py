"""A run is never stopped by its judge: what could not be judged is said on the screen, in the summary and in the report."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from data_pipelines.run_folder import RunFolder
from launch.cli import main
from launch.stages import report, results
from launch.supervision.processes import Stopped
from trainer.config import load_config
from trainer.decoding import placement
from trainer.decoding.judges import NotJudged

TRAINED = {
    "world_size": 1, "steps": 3, "packs": 6, "tokens": 1500, "seconds": 2.0, "tokens_per_second": 750.0,
    "wait_fraction": 0.1, "loss": {"first": 3.0, "last": 2.0}, "trained_share": 1.0, "weights_sha256": "0" * 64,
}  # fmt: skip
NUMBERS = {
    "acceptance_length": 1.5, "rounds": 7, "tokens": 11, "prefix_rate": [0.5, None], "conditional_rate": [0.5, 0.2],
}  # fmt: skip
JUDGED = {"overall": NUMBERS, "domains": {"code": NUMBERS}, "lossless": True, "mismatches": [], "dtype": "float32"}


@pytest.fixture
def setup(tmp_path):
    config = load_config("ci_eagle3", [f"run_dir={tmp_path}", "source=colocated"])
    (tmp_path / "training.json").write_text(json.dumps(TRAINED))
    target = SimpleNamespace(name="tests/target", fingerprint="f", path="/models/target")
    changes = SimpleNamespace(possible=frozenset())
    return SimpleNamespace(
        config=config,
        run_dir=tmp_path,
        folder=RunFolder(tmp_path),
        identity={"seed": 0},
        changes=changes,
        target=target,
    )


def judging(monkeypatch, outcome):
    def evaluate_run(config, run_dir, when):
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(results, "evaluate_run", evaluate_run)


def written(setup, before, after):
    """summary.json, the report and the last screen."""
    setup.config.data.regenerate.mode = "never"
    summary = results.summarise(setup, before, after, setup.run_dir / "export")
    report.write_report(summary, setup.config, {"counts": {"documents": 3}}, setup.run_dir)
    console = Console(file=io.StringIO(), width=200)
    console.print(report.table(summary))
    read = json.loads((setup.run_dir / "summary.json").read_text())
    return read, (setup.run_dir / "report.html").read_text(), " ".join(console.file.getvalue().split())


def test_no_judge(setup, monkeypatch):
    for when in ("before", "after"):
        judging(monkeypatch, NotJudged("the weights take 3,725 GiB", fix="more memory"))
        assert results.judge(setup, when) == {"not_judged": "the weights take 3,725 GiB"}
        judging(monkeypatch, RuntimeError("CUDA out of memory.\nTried to allocate"))
        failed = results.judge(setup, when)
        log = setup.run_dir / "logs" / f"judge-{when}.log"
        assert failed == {"not_judged": f"RuntimeError: CUDA out of memory. (more in {log})"}
        assert "Traceback" in log.read_text()
        judging(monkeypatch, Stopped())  # whoever stops a run is obeyed
        with pytest.raises(Stopped):
            results.judge(setup, when)
    assert results.describe(failed).startswith("NOT JUDGED: RuntimeError")
    summary, page, table = written(setup, failed, failed)
    assert summary["acceptance"] == {"before": {}, "after": {}} and summary["lossless"] is None
    assert summary["not_judged"] == failed["not_judged"]
    assert "Not judged" in page and "CUDA out of memory" in page and "not judged: RuntimeError" in table

    judging(monkeypatch, JUDGED)  # a failure is not remembered: the same run, given again, is judged
    assert results.judge(setup, "after") == JUDGED
    judging(monkeypatch, RuntimeError())
    assert results.judge(setup, "after") == JUDGED


def test_not_asked_for(setup, monkeypatch):
    judging(monkeypatch, JUDGED)
    setup.config.evaluate.before = False
    before, after = (results.judge(setup, when) for when in ("before", "after"))
    assert results.describe(before) == "not asked for (evaluate.before=false)"
    assert results.describe(after) == "acceptance length 1.50 over 7 rounds; lossless"
    summary, page, table = written(setup, before, after)
    assert summary["acceptance"]["before"] == {} and set(summary["acceptance"]["after"]) == {"code", "all"}
    assert (summary["not_judged"], summary["lossless"]) == (None, True)
    assert "acceptance length 1.50 after 3 steps" in table and "Not judged" not in page and "Lossless" in page
    setup.config.evaluate.enabled = False
    assert results.describe(results.judge(setup, "before")) == "not asked for (evaluate=none)"


def test_bfloat16_is_said():
    gaps = [{"logit_gap": 0.015625}, {"logit_gap": None}]
    said = results.describe({**JUDGED, "dtype": "bfloat16", "lossless": False, "mismatches": gaps})
    assert said.endswith("NOT lossless: 2 texts differ (in bfloat16, where two logits were 0.016 apart or less)")


def test_where_it_goes_is_known_before_anything_starts(setup, monkeypatch, tiny_target):
    evaluate = setup.config.evaluate
    assert results.place_judge(setup.config, tiny_target).startswith("in float32 on c")
    monkeypatch.setattr(placement, "find_devices", lambda: [placement.Device("cuda:0", 1000)])
    said = results.place_judge(setup.config, tiny_target)
    assert said.startswith("NOT JUDGED, the run trains all the same: the target's weights take") and "cuda:0" in said
    config = replace(setup.config, evaluate=replace(evaluate, enabled=False))
    assert results.place_judge(config, tiny_target) == "not asked for (evaluate=none)"


def test_prompts_that_do_not_exist(tmp_path, capfd):
    arguments = ["run", "ci_eagle3", f"run_dir={tmp_path}", "source=colocated", "evaluate.prompts=nowhere.jsonl"]
    assert main(arguments) == 2
    assert "evaluate.prompts=nowhere.jsonl does not exist" in capfd.readouterr().err
