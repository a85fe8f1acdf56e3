"""A run that goes on under other values: a finished one made longer, one that diverged at a lower rate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from data_pipelines.errors import UserError
from trainer.checkpoint import Changes, choose_checkpoint, whole_checkpoints
from trainer.config import load_config
from trainer.identity import changes
from trainer.seal import read_seal, seal

from .running import metrics, result, train_here

CONSTANT = ["optim.warmup_fraction=0", "optim.final_lr_fraction=1", "data.max_rows=30"]
POSSIBLE = frozenset({"epochs", "optim.lr"})


def refused(run_dir: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as error:
        train_here(run_dir, *CONSTANT, *overrides)
    return str(error.value)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """Of 4 steps, under a rate of 0.1."""
    folder = tmp_path / "checkpoints" / "step_00000004"
    folder.mkdir(parents=True)
    seal(folder, 4, {"plan": "a", "optim.lr": 0.1, "epochs": 1})
    return folder


def test_a_finished_run_made_longer_is_the_longer_run(tmp_path, caplog):
    """At a constant rate, bit for bit: the packs of the first epoch are the same, and nothing of the end was kept."""
    long, short = tmp_path / "long", tmp_path / "short"
    train_here(long, *CONSTANT, "epochs=2")
    train_here(short, *CONSTANT, "epochs=1")
    steps = result(short)["steps"]
    said = refused(short, "epochs=2")
    assert "epochs: 1 there, 2 now" in said and "add 'allow=[epochs]'" in said
    train_here(short, *CONSTANT, "epochs=2", "allow=[epochs]")
    assert "with another value, as allowed: epochs: 1 there, 2 now" in caplog.text
    assert [row["step"] for row in metrics(short)] == [*range(result(long)["steps"])] and result(long)["steps"] > steps
    assert result(short)["weights_sha256"] == result(long)["weights_sha256"]
    newest = whole_checkpoints(short / "checkpoints")[-1]
    assert read_seal(newest).identity["epochs"] == 2
    said = refused(short, "epochs=2", "max_steps=1", "allow=[max_steps]")
    assert f"the checkpoint is of {2 * steps} steps, and the run has 1 now" in said


def test_a_run_that_diverged_goes_on_as_its_message_says(tmp_path):
    """Before its first checkpoint, and after."""
    said = refused(tmp_path, "optim.lr=1e30", "checkpoint.every=0")
    assert "the gradient is not finite" in said
    assert "optim.lr=5e+29 begins anew; no checkpoint was written yet" in said and "allow" not in said
    train_here(tmp_path, *CONSTANT, "optim.lr=1e-3", "max_steps=2")
    said = refused(tmp_path, "optim.lr=1e30", "allow=[optim.lr,max_steps]")
    assert "optim.lr=5e+29 'allow=[optim.lr]' goes on from step" in said
    train_here(tmp_path, *CONSTANT, "optim.lr=1e-4", "max_steps=4", "allow=[optim.lr,max_steps]")
    assert [row["lr"] for row in metrics(tmp_path)] == [1e-3, 1e-3, 1e-4, 1e-4]


def test_what_differs_and_is_not_allowed_is_refused_with_the_allow_that_permits_it(checkpoint):
    now = {"plan": "a", "optim.lr": 0.2, "epochs": 2}
    for allowed in ((), ("epochs",)):
        with pytest.raises(UserError) as refused:
            choose_checkpoint(checkpoint.parent, "auto", now, Changes(frozenset(allowed), POSSIBLE))
        assert "optim.lr: 0.1 there, 0.2 now" in refused.value.what
        assert "add 'allow=[epochs,optim.lr]'" in refused.value.fix
    assert choose_checkpoint(checkpoint.parent, "auto", now, Changes(POSSIBLE, POSSIBLE)) == checkpoint
    with pytest.raises(UserError) as refused:
        choose_checkpoint(checkpoint.parent, "auto", {**now, "plan": "b"}, Changes(frozenset(), POSSIBLE))
    assert "plan: a there, b now" in refused.value.what and "allow" not in refused.value.fix


def test_what_no_run_can_go_on_with_cannot_be_allowed():
    config = load_config("ci_eagle3", ["allow=[optim.lr]"])
    assert {"drafter.loss", "optim.lr", "epochs"} <= changes(config).possible
    for key in ("data.path", "global_batch", "drafter.num_layers", "drafter.steps", "target", "optim.lrr"):
        with pytest.raises(UserError, match=f"a run cannot go on with another {key}"):
            changes(replace(config, allow=[key]))
