"""`drafter.init`: a run begins as a drafter that there is already, whoever made it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel, SpeculatorModelConfig

from data_pipelines.errors import UserError
from trainer.checkpoint import choose_checkpoint
from trainer.config import load_config, save_config
from trainer.decoding.judge import judge_saved
from trainer.decoding.run import evaluate_run
from trainer.drafters import build_drafter
from trainer.drafters.mtp import MTPConfig
from trainer.export.config import ExportConfig
from trainer.export.run import export_run
from trainer.export.saved import read_export
from trainer.export.speculators import export_drafter
from trainer.seal import seal
from trainer.setup import RunSetup, prepare_run
from trainer.target import FrozenTarget

from .export.test_saved import edit
from .export.theirs import written
from .running import RECIPE, metrics, result, train_here

FEW = ["evaluate.max_prompts=5", "evaluate.max_new_tokens=12"]
TAPS = {"eagle3": "eagle_aux_hidden_state_layer_ids"}
BLOCKS = {"dflash": ["drafter.block_size=8"], "dspark": ["drafter.block_size=8", "drafter.markov_rank=256"]}
RECIPES = {"mtp": "ci_mtp", "eagle3": "ci_eagle3", "dflash": "ci_dflash", "dspark": "ci_dspark"}


def setup_of(run_dir: Path, *overrides: str, recipe: str = "ci_eagle3") -> RunSetup:
    config = load_config(recipe, [*RECIPE, *FEW, f"run_dir={run_dir}", *overrides])
    save_config(config, run_dir / "config.yaml") if run_dir.exists() else None
    return prepare_run(config)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A short run of EAGLE-3 with a reduced vocabulary and a head of its own; exported."""
    run_dir = tmp_path_factory.mktemp("trained")
    options = ["drafter.draft_vocab_size=300", "drafter.train_head=true", "drafter.taps=[1,4]", "drafter.fc_norm=true"]
    train_here(run_dir, *options, "export.dtype=float32")
    export_run(prepare_run(load_config("ci_eagle3", [*RECIPE, *options, f"run_dir={run_dir}", "export.dtype=float32"])))
    return run_dir


@pytest.fixture(scope="module")
def theirs(tmp_path_factory, trained, tiny_target) -> dict[str, Path]:
    """Exports that speculators wrote: one of each kind with its defaults, and the trained one, loaded and saved again; and
    one of MTP, which it does not make for this family, that we wrote."""
    torch.manual_seed(1)
    kinds = ("eagle3", "dflash", "dspark", "mtp", "trained")
    paths = {kind: tmp_path_factory.mktemp(kind) / "export" for kind in kinds}
    for kind in ("eagle3", "dflash", "dspark"):
        mask = {} if kind == "eagle3" else {"mask_token_id": 5}
        keys = {TAPS.get(kind, "aux_hidden_state_layer_ids"): [1, 3, 5], "draft_vocab_size": 200, **mask}
        written(paths[kind], tiny_target, kind, "llama" if kind == "eagle3" else "qwen3", **keys)
    frozen = FrozenTarget.load(tiny_target, torch.float32)
    mtp = build_drafter(MTPConfig(), tiny_target.config, None)
    export_drafter(mtp, frozen, tiny_target, ExportConfig(dtype="float32"), paths["mtp"], mtp.depth)
    again = shutil.copytree(trained / "export", tmp_path_factory.mktemp("again") / "export")
    config = json.loads((again / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = tiny_target.path
    (again / "config.json").write_text(json.dumps(config))
    config = SpeculatorModelConfig.from_pretrained(again)
    config.transformer_layer_config._attn_implementation = "eager"
    SpeculatorModel.from_pretrained(again, config=config).save_pretrained(paths["trained"])
    return paths


@pytest.mark.parametrize("which", ["ours", "eagle3", "dflash", "dspark", "mtp", "trained"])
def test_at_step_0_it_accepts_what_the_export_does(trained, theirs, tiny_target, tmp_path, which):
    """A run's judgement before its first step, and the export's own, in every number; the draft vocabulary is the same."""
    path = theirs[which] if which != "ours" else trained / "export"
    recipe = RECIPES.get(which, "ci_eagle3")
    setup = setup_of(tmp_path, f"drafter.init={path}", *BLOCKS.get(which, []), recipe=recipe)
    before = evaluate_run(setup.config, tmp_path, "before")
    own = judge_saved(
        tiny_target, str(path), setup.config.evaluate, setup.config.seed, setup.config.evaluate.draft_tokens
    )
    assert before["lossless"] and own["lossless"]
    assert (before["overall"], before["domains"]) == (own["overall"], own["domains"])
    if which in ("ours", "trained"):
        assert before["overall"]["acceptance_length"] > 1.2, "nothing to compare"
    drafter, stored = (
        setup.build_drafter(FrozenTarget.load(tiny_target, torch.float32)),
        load_file(path / "model.safetensors"),
    )
    own_weights = {name: tensor for name, tensor in drafter.state_dict().items() if name in stored}
    assert len(own_weights) > 5 and all(torch.equal(tensor, stored[name]) for name, tensor in own_weights.items())
    assert ("d2t" in own_weights) == (which != "mtp")
    if which != "mtp":
        assert torch.equal(drafter.kept, stored["d2t"] + torch.arange(len(stored["d2t"]))), (
            "not one of the run's own data"
        )


def test_it_trains_on_from_there_and_its_own_export_has_the_same_vocabulary(trained, tmp_path):
    train_here(tmp_path, f"drafter.init={trained}", "max_steps=2", "drafter.loss=kl", "drafter.steps=2")
    first, last = metrics(trained)[0], metrics(trained)[-1]
    begins = metrics(tmp_path)[0]["conditional_rate"][0]
    assert abs(begins - last["conditional_rate"][0]) < abs(begins - first["conditional_rate"][0])
    assert len(metrics(tmp_path)[0]["conditional_rate"]) == 2, "how it is trained is the run's"
    setup = setup_of(tmp_path, f"drafter.init={trained}", "drafter.loss=kl", "drafter.steps=2")
    exported = load_file(export_run(setup) / "model.safetensors")
    before = load_file(trained / "export" / "model.safetensors")
    assert torch.equal(exported["d2t"], before["d2t"]) and torch.equal(exported["t2d"], before["t2d"])
    assert not torch.equal(exported["fc.weight"], before["fc.weight"])
    assert result(tmp_path)["steps"] == 2


def test_without_an_export_the_newest_checkpoint_is_taken(trained, tmp_path, tiny_target):
    shutil.copytree(trained / "checkpoints", tmp_path / "other" / "checkpoints")
    shutil.copy(trained / "config.yaml", tmp_path / "other")
    setup = setup_of(tmp_path / "run", f"drafter.init={tmp_path / 'other'}")
    exported = read_export(trained / "export", tiny_target.config)
    assert setup.start.path == max((tmp_path / "other" / "checkpoints").iterdir())
    assert torch.equal(setup.kept, exported.kept)
    assert setup.config.drafter.fc_norm and setup.config.drafter.train_head and setup.config.drafter.taps == [1, 4]
    assert all(torch.equal(setup.start.weights[name], tensor) for name, tensor in exported.weights.items())
    assert torch.equal(setup.start.head, exported.head)
    (setup.start.path / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(UserError, match=r"is broken: __0_0\.distcp has 0 bytes"):
        setup_of(tmp_path / "run", f"drafter.init={setup.start.path}")


def test_keys_that_were_given_and_contradict_the_export_are_refused_naming_both(trained, tmp_path):
    given = {"draft_vocab_size": 100, "taps": "[1,3]", "num_layers": 2, "norm_output": "true"}
    with pytest.raises(UserError) as refused:
        setup_of(tmp_path, f"drafter.init={trained}", *(f"drafter.{key}={value}" for key, value in given.items()))
    for words in ("draft_vocab_size=100, and draft_vocab_size=300 there", "taps=[1, 3], and taps=[1, 4] there"):
        assert f"drafter.{words}" in refused.value.what
    for words in ("num_layers=2, and num_layers=1 there", "norm_output=True, and norm_output=False there"):
        assert f"drafter.{words}" in refused.value.what
    same = ["drafter.draft_vocab_size=300", "drafter.taps=[1,4]"]
    assert setup_of(tmp_path, f"drafter.init={trained}", *same).config.drafter.fc_norm


def test_another_kind_and_another_set_of_heads_are_refused(trained, theirs, tmp_path):
    with pytest.raises(UserError, match=r"drafter=dflash, but what drafter\.init=.* holds is eagle3"):
        setup_of(tmp_path, f"drafter.init={trained}", recipe="ci_dflash")
    init = f"drafter.init={theirs['dspark']}"
    with pytest.raises(UserError, match=r"drafter\.block_size=4, and block_size=8 there"):  # the recipe's own
        setup_of(tmp_path, init, recipe="ci_dspark")
    half = setup_of(
        tmp_path, init, *BLOCKS["dspark"], "drafter.confidence_weight=0.5", recipe="ci_dspark"
    ).config.drafter
    assert half.confidence_weight == 0.5
    with pytest.raises(UserError, match=r"drafter\.confidence_weight=0\.0, and confidence_weight=1\.0 there"):
        setup_of(tmp_path, init, *BLOCKS["dspark"], "drafter.confidence_weight=0", recipe="ci_dspark")


def test_a_head_like_the_targets_stays_the_targets_unless_it_is_to_be_trained(theirs, tmp_path):
    init = f"drafter.init={theirs['eagle3']}"
    assert not setup_of(tmp_path, init).config.drafter.train_head
    assert setup_of(tmp_path, init, "drafter.train_head=true").config.drafter.train_head
    assert setup_of(tmp_path, f"drafter.init={theirs['trained']}").config.drafter.train_head


def test_what_was_loaded_is_in_the_identity(trained, tmp_path):
    first = shutil.copytree(trained / "export", tmp_path / "first")
    setup = setup_of(tmp_path / "run", f"drafter.init={first}")
    assert setup.identity["drafter.init"] == str(first) and setup.identity["drafter.fc_norm"] is True
    assert setup.identity["drafter.init_sha256"] == setup.start.sha256
    folder = tmp_path / "run" / "checkpoints" / "step_00000001"
    folder.mkdir(parents=True)
    seal(folder, 1, setup.identity)
    moved = setup_of(tmp_path / "run", f"drafter.init={first.rename(tmp_path / 'moved')}")
    assert choose_checkpoint(folder.parent, "auto", moved.identity) == folder, "the same bytes elsewhere"
    edit(tmp_path / "moved", speculators_version="0.9.1")
    other = setup_of(tmp_path / "run", f"drafter.init={tmp_path / 'moved'}")
    with pytest.raises(UserError, match=r"drafter\.init_sha256: [0-9a-f]{64} there, [0-9a-f]{64} now"):
        choose_checkpoint(folder.parent, "auto", other.identity, other.changes)


def test_more_drafts_than_the_drafter_has_are_refused_by_the_judge(theirs, tiny_target):
    setup = load_config("ci_eagle3", FEW)
    with pytest.raises(UserError, match="--draft-tokens 9, and this drafter drafts at most 7 a round"):
        judge_saved(tiny_target, str(theirs["dflash"]), setup.evaluate, 0, 9)
    few = replace(setup.evaluate, max_prompts=1, max_new_tokens=8)
    assert judge_saved(tiny_target, str(theirs["dflash"]), few, 0, None)["draft_tokens"] == 3, "as the export says"
