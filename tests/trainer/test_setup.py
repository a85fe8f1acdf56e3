"""From a config to a run: what only the target can tell is filled in, what cannot work is refused before it starts."""

from __future__ import annotations

import pytest

from data_pipelines.errors import UserError
from trainer.config import load_config
from trainer.setup import prepare_run


def prepare(recipe, tmp_path, *overrides):
    return prepare_run(load_config(recipe, [f"run_dir={tmp_path}", "data.max_rows=24", *overrides]))


@pytest.mark.parametrize("recipe", ["ci_dflash", "ci_dspark"])
def test_the_mask_token_is_chosen_once_and_decides_the_weights(tiny_target, tmp_path, recipe):
    setup = prepare(recipe, tmp_path)
    chosen = tiny_target.load_tokenizer().pad_token_id  # its embedding has no row to spare, and nothing is reserved
    assert setup.config.drafter.mask_token == setup.identity["drafter.mask_token"] == chosen
    assert prepare(recipe, tmp_path, "drafter.mask_token=9").identity["drafter.mask_token"] == 9


def test_more_drafts_than_a_block_holds_are_refused_before_the_run(tmp_path):
    with pytest.raises(UserError, match=r"evaluate\.draft_tokens=5, and this drafter drafts at most 4 a round"):
        prepare("ci_dflash", tmp_path, "evaluate.draft_tokens=5")
    prepare("ci_eagle3", tmp_path, "evaluate.draft_tokens=9")
