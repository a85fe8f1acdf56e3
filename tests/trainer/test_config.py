"""Configuration: every refusal names what was wrong and the nearest right thing."""

from __future__ import annotations

import pytest

from data_pipelines.errors import UserError
from trainer.config import load_config, read_config, recipe_names, save_config


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_composes_and_survives_a_round_trip(recipe, tmp_path):
    config = load_config(recipe, ["data.path=rows.jsonl"])  # a production recipe leaves the data to its user
    assert config.recipe == recipe
    assert config.run_dir == f"outputs/{recipe}"
    save_config(config, tmp_path / "config.yaml")
    assert read_config(tmp_path / "config.yaml") == config


def test_overrides_and_groups():
    config = load_config("ci_eagle3", ["optim.lr=0.5", "source=offline", "drafter.taps=[1,4]", "run_dir=/x"])
    assert (config.optim.lr, config.source.name, config.drafter.taps, config.run_dir) == (0.5, "offline", [1, 4], "/x")


def test_a_recipe_may_be_a_file_of_ones_own(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [ci_eagle3, _self_]\nseed: 7\n")
    assert load_config(str(tmp_path / "mine.yaml")).seed == 7
    assert load_config("mine", config_dir=str(tmp_path)).recipe == "mine"


@pytest.mark.parametrize(
    ("recipe", "overrides", "said"),
    [
        ("ci_eagle", [], "did you mean ci_eagle3?"),
        ("./nowhere.yaml", [], "does not exist"),
        ("ci_eagle3", ["optim.learning_rate=1"], "optim has lr, betas"),
        ("ci_eagle3", ["drafter.stpes=3"], "did you mean drafter.steps?"),
        ("ci_eagle3", ["lr=3"], "did you mean optim.lr?"),
        ("ci_eagle3", ["drafter.slots=4"], "belongs to drafter=dflash and drafter=dspark"),
        ("ci_eagle3", ["run_dir="], "run_dir is empty"),
        ("nope", [], "recipes: ci_dflash"),
        ("ci_eagle3", ["+optim.momentum=1"], "optim.momentum"),
        ("ci_eagle3", ["+anything=1"], "unknown key anything"),
        ("ci_eagle3", ["optim.lr=fast"], "optim.lr"),
        ("ci_eagle3", ["epochs=1.5"], "epochs"),
        ("ci_eagle3", ["parallel.timeout_seconds=300"], "not more than source.patience_seconds=300"),
        ("ci_eagle3", ["parallel.timeout_seconds=0", "source=colocated"], "parallel.timeout_seconds=0"),
        ("ci_eagle3", ["source=streem"], "did you mean stream?"),
        ("ci_eagle3", ["source.name=nfs"], "not one of stream"),
        ("ci_eagle3", ["drafter.norm_before_fc=true", "drafter.fc_norm=true"], "exclude each other"),
        ("ci_eagle3", ["global_batch=3"], "multiple of 2"),
        ("ci_eagle3", ["epochs=0"], "at least 1"),
        ("ci_eagle3", ["max_steps=-1"], "at least 0"),
        ("ci_eagle3", ["optim.name=sgd"], "optim.name"),
        ("ci_eagle3", ["data.max_document_tokens=9999"], "must fit into one pack"),
        ("ci_eagle3", ["optim.lr"], "key=value"),
        ("ci_eagle3", ["target=hf"], "target.path"),
        ("ci_eagle3", ["resume=sometimes"], "resume"),
        ("llama31_8b_eagle3", [], "no value for data.path"),
    ],
)
def test_what_is_refused(recipe, overrides, said):
    with pytest.raises(UserError) as refusal:
        load_config(recipe, overrides)
    message = str(refusal.value)
    assert said in message
    assert len(message.splitlines()) <= 12 and "Traceback" not in message and "object_type" not in message
