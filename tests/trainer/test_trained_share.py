"""A training that trains nothing says so: in a step's numbers, in the result, and before it starts."""

from __future__ import annotations

import json

import pytest
import torch

from data_pipelines.errors import UserError
from trainer.metrics import summarise
from trainer.result import mean_losses, trained_share
from trainer.setup import prepare_run

from .running import RECIPE, load_config


def one_step(world, drafter) -> dict:
    batch = world.make([14, 9], mask="all").batch
    targets = drafter.targets(batch, world.frozen)
    weights = torch.tensor(drafter.step_weights) / targets.denominators.clamp(min=1)
    return summarise(drafter, drafter(batch, targets, world.frozen, weights)[1])


def test_the_share_of_drafts_that_is_trained(world):
    """Drafts whose teacher's argmax the draft vocabulary lacks count and are not trained."""
    whole = world.drafter(taps=[1, 2, 3], steps=2)
    batch = world.make([14, 9], mask="all").batch
    targets = whole.targets(batch, world.frozen)
    wanted = targets.teacher.argmax[targets.teacher_rows]
    row = one_step(world, whole)
    assert row["trained_share"] == 1.0 and row["loss"] > 0
    assert row["drafts"] == len(wanted) == int(targets.counts.sum())

    outside = torch.tensor(sorted(set(range(61)) - set(wanted.tolist())))
    row = one_step(world, world.drafter(kept=outside, taps=[1, 2, 3], steps=2))
    assert row["trained_share"] == 0.0 and row["loss"] is None and row["drafts"] == len(wanted)

    one = wanted[0].item()
    some = torch.cat([outside, torch.tensor([one])]).sort().values
    row = one_step(world, world.drafter(kept=some, taps=[1, 2, 3], steps=2))
    assert row["trained_share"] == pytest.approx((wanted == one).float().mean().item()) and row["loss"] > 0

    nothing = world.drafter(taps=[1, 2, 3], steps=2)
    sums = torch.zeros(len(nothing.metrics), 2, dtype=torch.double)
    assert summarise(nothing, sums)["trained_share"] is None and summarise(nothing, sums)["loss"] is None


def test_a_loss_is_the_mean_of_a_tenth_of_the_steps_that_trained_something():
    rows = [{"loss": None if step % 2 else 100.0 - step} for step in range(60)]  # 30 of them have a loss
    assert mean_losses(rows) == {"first": (100 + 98 + 96) / 3, "last": (46 + 44 + 42) / 3}
    assert mean_losses([{"loss": float(step)} for step in range(1000)]) == {"first": 9.5, "last": 989.5}
    assert mean_losses([{"loss": 3.0}]) == {"first": 3.0, "last": 3.0}
    assert mean_losses([{"loss": None}]) == {"first": None, "last": None}


def test_the_share_of_a_run_weighs_steps_by_their_drafts():
    rows = [
        {"drafts": 30, "trained_share": 1.0},
        {"drafts": 10, "trained_share": 0.0},
        {"drafts": 0, "trained_share": None},
    ]
    assert trained_share(rows) == 0.75
    assert trained_share(rows[2:]) is None


@pytest.mark.parametrize(("recipe", "mask", "refused"), [
    ("ci_eagle3", [0, 1, 0, 1, 0, 1], True),
    ("ci_eagle3", [1, 1, 0, 1, 0, 1], True),  # the first token is never a bonus token: no row comes before it
    ("ci_dflash", [1, 1, 0, 1, 0, 1], False),  # but it can be an anchor
    ("ci_eagle3", [0, 1, 1, 0, 0, 1], False),
])  # fmt: skip
def test_data_in_which_no_draft_counts_are_refused_before_the_run(tmp_path, recipe, mask, refused):
    rows = [{"input_ids": [5 + i, 6, 7, 8, 9, 10], "loss_mask": mask} for i in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [
        f"data.path={tmp_path / 'rows.jsonl'}",
        "data.regenerate.mode=never",
        "data.pack_tokens=8",
    ]
    config = load_config(recipe, [*RECIPE, *data, "data.max_document_tokens=8", f"run_dir={tmp_path / 'run'}"])
    if not refused:
        prepare_run(config)
        return
    with pytest.raises(UserError, match="no draft of the data counts"):
        prepare_run(config)
