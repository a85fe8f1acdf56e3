"""Exports that others write are read: with speculators' defaults, of any shape; or they are refused in words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from data_pipelines.engines import Target
from data_pipelines.errors import UserError
from tests.trainer.export.test_block_drafters import their_forward
from tests.trainer.export.test_speculators import move_their_window
from tests.trainer.export.theirs import OWN, written
from trainer.batch import Batch
from trainer.export.saved import find_drafter, read_drafter, read_export
from trainer.target import FrozenTarget

STEPS = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory, target_config) -> Target:
    """Eight layers, random; no tokenizer."""
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(target_config).save_pretrained(path)
    return Target(str(path), str(path))


@pytest.fixture(scope="module")
def frozen(target) -> FrozenTarget:
    return FrozenTarget.load(target, torch.float32)


@pytest.fixture
def document(target) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, target.config.vocab_size, (15,), generator=generator)
    taps = torch.randn(15, 3, target.config.hidden_size, generator=generator)
    final = torch.randn(15, target.config.hidden_size, generator=generator)
    every = torch.ones(15, dtype=torch.bool)
    return Batch(ids, torch.zeros(15, dtype=torch.long), torch.arange(15), every, taps, final)


SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5, "use_sliding_window": True}
EAGLE3 = {
    "defaults": ("llama", {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}),
    "null layers": ("llama", {}),
    "qwen3": ("qwen3", {"norm_before_residual": True, "fc_norm": True, "norm_output": True}),
    "reduced vocabulary": ("qwen3", {"draft_vocab_size": 40, "norm_before_fc": True}),
    "sliding windows": ("qwen3", {"keys": {**OWN, **SLIDING}}),
}


@pytest.mark.parametrize("case", EAGLE3)
def test_an_eagle3_drafter_of_speculators_drafts_the_same_here(target, frozen, document, tmp_path, monkeypatch, case):
    layers, options = EAGLE3[case]
    if "keys" in options:
        move_their_window(monkeypatch, SLIDING["sliding_window"])
    theirs = written(tmp_path / "export", target, "eagle3", layers, **options)
    saved = read_export(tmp_path / "export", target.config)
    assert saved.config.taps == options.get(
        "eagle_aux_hidden_state_layer_ids", [2, 4, 5]
    )  # speculators' default of 8 layers
    assert saved.config.num_layers == 2 and saved.config.train_head and not saved.has_own_head(frozen)
    drafter, logits = saved.build(target.config), []
    theirs.lm_head.register_forward_hook(lambda _, args, output: logits.append(output[0]))
    rows = torch.arange(15 - STEPS)
    with torch.no_grad():
        theirs(
            hidden_states=document.taps.flatten(1)[None], input_ids=document.input_ids.roll(-1)[None],
            document_ids=document.document_ids[None], position_ids=1 + document.positions[None], ttt_steps=STEPS,
        )  # fmt: skip
        outputs = drafter.roll_out(document, frozen, [rows] * STEPS)
        for output, expected in zip(outputs, logits, strict=True):
            torch.testing.assert_close(output @ drafter.head(frozen).T, expected[rows], atol=2e-4, rtol=1e-4)
    if saved.kept is not None:
        assert torch.equal(drafter.d2t, theirs.d2t) and torch.equal(drafter.t2d, theirs.t2d)


SPARK = {"markov_rank": 6, "sample_from_anchor": True}
BLOCKS = {
    "dflash: defaults, null layers": ("dflash", "qwen3", {"aux_hidden_state_layer_ids": None}, {"sample_from_anchor": False}),
    "dflash: llama's config": ("dflash", "llama", {"draft_vocab_size": 40}, {}),
    "dspark: defaults": ("dspark", "qwen3", {}, {"markov_rank": 256}),
    "dspark: gated, head without the markov embedding": (
        "dspark", "qwen3", {"markov_rank": 6, "markov_head_type": "gated", "confidence_head_with_markov": False}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BLOCKS)
def test_a_block_drafter_of_speculators_drafts_the_same_here(target, frozen, document, tmp_path, monkeypatch, case):
    kind, layers, options, expected = BLOCKS[case]
    keys = {"aux_hidden_state_layer_ids": [2, 4, 5], "mask_token_id": 60, **options}
    null = keys["aux_hidden_state_layer_ids"] is None
    if null:  # speculators fills it in before it builds the modules
        keys["aux_hidden_state_layer_ids"] = [2, 4, 5]
    theirs = written(tmp_path / "export", target, kind, layers, **keys)
    if null:
        edit(tmp_path / "export", aux_hidden_state_layer_ids=None)
    saved = read_export(tmp_path / "export", target.config)
    assert (saved.config.taps, saved.config.block_size) == ([2, 4, 5], 8)
    assert saved.config.max_drafts == (7 if kind == "dflash" else 8)
    assert saved.config.markov_rank == expected["markov_rank"] if "markov_rank" in expected else True
    drafter = saved.build(target.config, frozen)
    saved.has_own_head(frozen)
    anchors, size = torch.tensor([0, 1, 3, 5]), 8
    with torch.no_grad():
        drafter.config.gamma = 4.0
        seen, _ = their_forward(theirs, drafter, document, anchors, monkeypatch, **loss(kind))
        hidden = drafter.train_blocks(document, frozen, anchors)
        previous = document.input_ids[anchors[:, None] + torch.arange(drafter.depth)]
        states, head = drafter.read_out(hidden, previous, frozen)
        logits = seen["logits"].view(len(anchors), size, -1)[:, size - drafter.depth :]
        torch.testing.assert_close(states @ head.T, logits, atol=3e-4, rtol=1e-4)
        if kind == "dspark":
            confidence = seen["confidence"].view(len(anchors), size)
            torch.testing.assert_close(drafter.confidence(hidden, previous), confidence, atol=1e-4, rtol=1e-4)
    if saved.kept is not None:
        assert torch.equal(drafter.d2t, theirs.d2t)


def loss(kind: str) -> dict:
    from speculators.losses import resolve_loss_config

    found = resolve_loss_config("tv", "eager")
    return {"loss_config": found, **({"tv_loss_fn": found["tv"][0]} if kind == "dspark" else {})}


def edit(path: Path, *gone: str, **changes) -> None:
    config = json.loads((path / "config.json").read_text())
    layer = {**config["transformer_layer_config"], **changes.pop("layer", {})}
    config = {**config, "transformer_layer_config": layer, **changes}
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key not in gone}))


@pytest.fixture
def export(target, tmp_path) -> Path:
    written(tmp_path / "export", target, "eagle3", draft_vocab_size=40, eagle_aux_hidden_state_layer_ids=[1, 3, 6])
    return tmp_path / "export"


def test_what_an_export_leaves_out_is_speculators_default(target, frozen, export):
    edit(
        export,
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "target_hidden_size",
        "speculators_config",
    )
    saved = read_drafter(find_drafter(str(export)), target)
    assert not saved.config.norm_before_residual and saved.tokens is None and saved.verifier == ""
    saved.build(target.config)
    tensors = load_file(export / "model.safetensors")
    del tensors["lm_head.weight"], tensors["embed_tokens.weight"], tensors["t2d"]  # engines take the target's
    save_file(tensors, export / "model.safetensors")
    saved = read_export(export, target.config)
    assert not saved.config.train_head and torch.equal(
        saved.build(target.config, frozen).head(frozen), frozen.draft_head(saved.kept)
    )


def test_a_sharded_export_is_read_whole(target, export):
    tensors = load_file(export / "model.safetensors")
    whole = read_export(export, target.config)
    (export / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({n: tensors[n] for n in names[::2]}, export / "model-00001-of-00002.safetensors")
    save_file({n: tensors[n] for n in names[1::2]}, export / "model-00002-of-00002.safetensors")
    again = read_export(export, target.config)
    assert again.weights.keys() == whole.weights.keys() and again.sha256 != whole.sha256


REFUSED = {
    "another kind": ({"speculators_model_type": "peagle"}, "'peagle', not one of eagle3, dflash, dspark, mtp"),
    "no kind": ({"speculators_model_type": None}, "None, not one of"),
    "no layers": ({"transformer_layer_config": None}, "no transformer_layer_config"),
    "unknown layers": ({"layer": {"model_type": "gemma2"}}, "layers of eagle3 are llama or qwen3 layers"),
    "a width that is a word": ({"layer": {"head_dim": "ten"}}, "is not a llama config"),
    "biases": ({"layer": {"attention_bias": True}}, "attention_bias is true"),
    "another width": ({"layer": {"hidden_size": 48}}, r"its hidden_size is 48, and this target's is 24"),
    "another vocabulary": ({"layer": {"vocab_size": 99}}, r"its vocab_size is 99, and this target's is 61"),
    "another target's width": ({"target_hidden_size": 32}, "target_hidden_size is 32, not 24"),
    "layers that the target lacks": ({"eagle_aux_hidden_state_layer_ids": [1, 3, 60]}, r"\[1, 3, 60\]; engines read"),
    "layers out of order": ({"eagle_aux_hidden_state_layer_ids": [6, 3, 1]}, r"\[6, 3, 1\]; engines read"),
    "fewer layers than fc reads": ({"eagle_aux_hidden_state_layer_ids": [1, 3]}, r"size mismatch for fc\.weight"),
    "both norms": ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
    "a flag that is a word": ({"fc_norm": "yes"}, "fc_norm is 'yes', which is no bool"),
    "another draft vocabulary": ({"draft_vocab_size": 41}, "d2t is not as long as draft_vocab_size"),
    "a larger one than the target's": ({"draft_vocab_size": 99}, "draft_vocab_size is 99"),
    "more layers than tensors": ({"layer": {"num_hidden_layers": 3}}, "tensors are not those that its config asks for"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_an_export_that_does_not_fit_is_refused_in_words(target, export, case):
    changes, words = REFUSED[case]
    edit(export, **changes)
    with pytest.raises(UserError, match=words) as refused:
        read_drafter(find_drafter(str(export)), target).build(target.config)
    assert str(export) in str(refused.value)


def test_a_broken_vocabulary_map_is_refused(target, export):
    tensors = load_file(export / "model.safetensors")

    def refused(words: str, **changes) -> None:
        changed = {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}
        save_file(changed, export / "model.safetensors")
        with pytest.raises(UserError, match=words):
            read_export(export, target.config)

    ids = tensors["d2t"] + torch.arange(40)
    refused("is not ascending, inside the vocabulary", d2t=ids, t2d=None)  # ids where offsets belong
    refused("and t2d contradict each other", d2t=torch.zeros(40, dtype=torch.long))
    refused("neither d2t nor t2d", d2t=None, t2d=None)
    refused("fc.weight holds values that are not finite", **{"fc.weight": tensors["fc.weight"] * float("nan")})


def test_a_block_drafter_with_another_head_than_the_targets_is_refused(target, frozen, tmp_path):
    path = tmp_path / "export"
    written(
        path, target, "dflash", "qwen3", draft_vocab_size=40, aux_hidden_state_layer_ids=[2, 4, 5], mask_token_id=60
    )
    assert not read_export(path, target.config).has_own_head(frozen)
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"] + 1}, path / "model.safetensors")
    with pytest.raises(UserError, match="the head that came with this drafter is not the target's"):
        read_export(path, target.config).has_own_head(frozen)


def test_another_target_of_the_same_shape_is_named(target, export, caplog):
    read_drafter(export, target)
    read_drafter(export, replace(target, name="org/another"))
    assert not caplog.records
    edit(export, speculators_config={"verifier": {"name_or_path": f"elsewhere/{Path(target.path).name}"}})
    read_drafter(export, target)
    assert not caplog.records
    edit(export, speculators_config={"verifier": {"name_or_path": "org/another"}})
    read_drafter(export, target)
    assert f"drafts for org/another, and this target is {target.name}" in caplog.text


def test_what_is_no_drafter(tmp_path):
    for name, words in ((str(tmp_path), "neither an export nor a run"), ("/nowhere", "/nowhere does not exist")):
        with pytest.raises(UserError, match=words):
            find_drafter(name)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").touch()
    assert find_drafter(str(tmp_path)) == find_drafter(str(tmp_path / "export")) == tmp_path / "export"
