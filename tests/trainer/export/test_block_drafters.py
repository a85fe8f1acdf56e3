"""DFlash and DSpark as `speculators` has them: the same tensors, the same logits, the same loss where we agree."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import speculators.models.dflash.core as dflash_core
import speculators.models.dspark.core as dspark_core
import torch
from safetensors.torch import load_file
from speculators.losses import resolve_loss_config

from tests.trainer.export.test_speculators import batch, frozen, judge  # noqa: F401  (fixtures)
from trainer.batch import Batch
from trainer.drafters import build_drafter
from trainer.drafters.base import Targets
from trainer.drafters.dflash import DFlashConfig
from trainer.drafters.dspark import DSparkConfig
from trainer.export.config import ExportConfig
from trainer.export.speculators import export_drafter, load_export

SLIDING, FULL = "sliding_attention", "full_attention"
DFLASH = {
    "plain": {},
    "anchor predicts": {"slots": "anchor_predicts"},
    "sliding layers": {"layer_types": [SLIDING, FULL], "sliding_window": 5},
    "causal sliding layers": {"layer_types": [SLIDING] * 2, "sliding_window": 4, "sliding_window_non_causal": False},
    "reduced vocabulary": {"draft_vocab_size": 100},
    "two taps, the last one final": {"taps": [1, 6]},
}
DSPARK = {
    "vanilla": {},
    "gated": {"markov_head": "gated"},
    "rnn": {"markov_head": "rnn"},
    "rnn, reduced vocabulary": {"markov_head": "rnn", "draft_vocab_size": 100},
    "no sequential head": {"markov_rank": 0},
    "no confidence head": {"confidence_weight": 0.0},
    "causal sliding layers": {"layer_types": [SLIDING, FULL], "sliding_window": 4},
}
CASES = [("dflash", name, o) for name, o in DFLASH.items()] + [("dspark", name, o) for name, o in DSPARK.items()]
cases = pytest.mark.parametrize("kind,options", [(k, o) for k, _, o in CASES], ids=[f"{k}: {n}" for k, n, _ in CASES])


def make_drafter(target, kind, options):
    """A drafter in which no tensor has a value that a loader would have given it."""
    torch.manual_seed(0)
    common = {"taps": [2, 3, 5], "num_layers": 2, "block_size": 4, "mask_token": 7}
    if kind == "dspark":
        common["markov_rank"] = 8
    config = {"dflash": DFlashConfig, "dspark": DSparkConfig}[kind](**{**common, **options})
    kept = None
    if config.draft_vocab_size:
        kept = torch.randperm(target.config.vocab_size)[: config.draft_vocab_size].sort().values
    drafter = build_drafter(config, target.config, kept)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return drafter.eval()


def their_forward(theirs, drafter, pack: Batch, anchors: torch.Tensor, monkeypatch, **options):
    """Their training forward with these anchors. → what it hands to its loss, and the loss."""
    seen = {}
    for core in (dflash_core, dspark_core):

        def capture(*args, core=core, compute=core.compute_metrics, **kwargs):
            names = (
                ("logits", "targets", "confidence", "mask") if core is dspark_core else ("logits", "targets", "mask")
            )
            seen.update(zip(names, args))
            return compute(*args, **kwargs)

        monkeypatch.setattr(core, "compute_metrics", capture)
    monkeypatch.setattr(dflash_core, "select_anchors", lambda *_: (anchors, torch.ones(len(anchors), dtype=torch.bool)))
    _, loss, _ = theirs(
        hidden_states=pack.taps.flatten(1)[None],
        input_ids=pack.input_ids[None],
        loss_mask=pack.supervised[None].long(),
        verifier_last_hidden_states=pack.final[None],
        document_ids=pack.document_ids[None],
        position_ids=pack.positions[None],
        max_anchors=len(anchors),
        gamma=drafter.config.gamma,
        **options,
    )
    return seen, loss


def of(batch: Batch, drafter) -> Batch:  # noqa: F811
    taps = batch.taps[:, list(drafter.taps)]
    return Batch(batch.input_ids, batch.document_ids, batch.positions, batch.supervised, taps, batch.final)


def ours_with(drafter, pack, frozen, anchors) -> Targets:  # noqa: F811
    targets = drafter.targets(pack, frozen)
    chosen = torch.zeros_like(targets.counts[0])
    chosen[anchors] = True
    return replace(targets, counts=targets.counts & chosen, trained=targets.trained & chosen)


@cases
def test_speculators_computes_the_same(tiny_target, frozen, batch, tmp_path, monkeypatch, kind, options):  # noqa: F811
    drafter = make_drafter(tiny_target, kind, options)
    cfg = ExportConfig(dtype="float32", verifier=tiny_target.path)
    theirs = judge(export_drafter(drafter, frozen, tiny_target, cfg, tmp_path / "export", drafter.depth))

    stored = load_file(tmp_path / "export" / "model.safetensors")
    assert not {"embed_tokens.weight", "verifier_lm_head.weight"} & stored.keys()
    assert ("lm_head.weight" in stored) == ("d2t" in stored) == ("t2d" in stored) == (drafter.kept is not None)
    not_stored = {"embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    if drafter.kept is None:
        not_stored |= {"lm_head.weight"}
    loaded = theirs.state_dict()
    assert loaded.keys() - not_stored == stored.keys()
    for name in stored:
        assert loaded[name].dtype == stored[name].dtype and torch.equal(loaded[name], stored[name]), name
    for tensor in loaded.values():
        assert not tensor.is_floating_point() or torch.isfinite(tensor).all()
    assert torch.equal(loaded["embed_tokens.weight"], frozen.embedding_weight)

    pack = of(batch, drafter)
    size, first = drafter.config.block_size, drafter.config.block_size - drafter.depth
    anchors = torch.tensor([0, 1, 3, 8, 9, 14, 17, 18])  # whole blocks lie inside their documents
    loss = "0.3*kl + 0.9*l1"
    drafter.config.loss = loss
    their_loss = resolve_loss_config(json.dumps({"kl_div": 0.3, "tv": 1.8}), "eager")  # l1 is twice the variation
    extra = {"tv_loss_fn": their_loss["tv"][0]} if kind == "dspark" else {}
    with torch.no_grad():
        seen, expected = their_forward(theirs, drafter, pack, anchors, monkeypatch, loss_config=their_loss, **extra)
        hidden = drafter.train_blocks(pack, frozen, anchors)
        previous = pack.input_ids[anchors[:, None] + torch.arange(drafter.depth)]
        states, head = drafter.read_out(hidden, previous, frozen)
        logits = seen["logits"].view(len(anchors), size, -1)[:, first:]
        torch.testing.assert_close(states @ head.T, logits, atol=2e-4, rtol=1e-4)
        if kind == "dspark" and drafter.confidence_head is not None:
            confidence = seen["confidence"].view(len(anchors), size)
            torch.testing.assert_close(drafter.confidence(hidden, previous), confidence, atol=1e-4, rtol=1e-4)
        if drafter.kept is not None:  # they renormalise the teacher for the variation, and train unmapped drafts
            return
        targets = ours_with(drafter, pack, frozen, anchors)
        assert targets.denominators.sum() == seen["mask"].sum() == len(anchors) * drafter.depth
        weights = torch.tensor(drafter.step_weights) / drafter.divisors(targets.denominators)
        torch.testing.assert_close(drafter(pack, targets, frozen, weights.float())[0], expected, atol=1e-4, rtol=1e-4)


def test_where_we_differ_on_purpose(tiny_target, frozen, batch, tmp_path, monkeypatch):  # noqa: F811
    """The mask is on the round. Theirs is on the slot's own position: drafting from the anchor, the slot of the last
    supervised token trains what comes after the turn, and a block runs on into the next document."""
    drafter = make_drafter(tiny_target, "dflash", {"slots": "anchor_predicts"})
    cfg = ExportConfig(dtype="float32", verifier=tiny_target.path)
    theirs = judge(export_drafter(drafter, frozen, tiny_target, cfg, tmp_path / "export", drafter.depth))
    supervised = torch.tensor([3 <= t < 9 for t in range(14)] + [t < 5 for t in range(9)])
    pack = replace(of(batch, drafter), supervised=supervised)
    anchors = torch.tensor([6, 8, 12, 16])
    with torch.no_grad():
        seen, _ = their_forward(
            theirs, drafter, pack, anchors, monkeypatch, loss_config=resolve_loss_config("tv", "eager")
        )
    mask = seen["mask"].view(4, 4).int().tolist()
    ours = ours_with(drafter, pack, frozen, anchors).counts[:, anchors].T.int().tolist()
    # supervised: 3…8 of the first document (0…13), 14…18 of the second.
    assert mask == [[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 1, 1], [1, 1, 1, 0]]
    assert ours == [[1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]]


@cases
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_read_back(tiny_target, frozen, tmp_path, kind, options, dtype):  # noqa: F811
    drafter = make_drafter(tiny_target, kind, options)
    export_drafter(drafter, frozen, tiny_target, ExportConfig(dtype=dtype), tmp_path / "export", drafter.depth)
    again = load_export(tmp_path / "export", tiny_target.config)
    assert again.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in again.state_dict().items():
        expected = drafter.state_dict()[name]
        assert torch.equal(
            tensor, expected.to(getattr(torch, dtype)).float() if tensor.is_floating_point() else expected
        )
    keys = "num_layers block_size slots mask_token sliding_window_non_causal"
    keys += " markov_head markov_rank" if kind == "dspark" else ""
    for key in keys.split():
        if key == "sliding_window_non_causal" and SLIDING not in drafter.layer_types:
            continue  # of no effect
        assert getattr(again.config, key) == getattr(drafter.config, key), key
    assert again.taps == drafter.taps and again.layer_types == drafter.layer_types and again.depth == drafter.depth
    assert SLIDING not in drafter.layer_types or again.config.sliding_window == drafter.config.sliding_window
    assert (again.kept is None) == (drafter.kept is None)


@pytest.mark.parametrize("kind,flag", [("dflash", True), ("dspark", True)])
def test_config(tiny_target, frozen, tmp_path, kind, flag):  # noqa: F811
    """The keys that engines read, at their places."""
    drafter = make_drafter(tiny_target, kind, {})
    export_drafter(drafter, frozen, tiny_target, ExportConfig(), tmp_path / "export", drafter.depth)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert "model_type" not in config  # vLLM reads the speculators config only in its absence
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == kind
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == drafter.depth
    assert config["architectures"] == [{"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}[kind]]
    assert config["aux_hidden_state_layer_ids"] == [2, 3, 5]
    assert config["block_size"] == 4 and config["mask_token_id"] == 7
    assert config["sample_from_anchor"] is (kind == "dspark")
    # Full attention is bidirectional in the block; vLLM has one flag for all layers.
    assert config["sliding_window_non_causal"] is flag
    layer, target = config["transformer_layer_config"], tiny_target.config
    assert layer["model_type"] == "qwen3" and layer["num_hidden_layers"] == 2
    assert layer["layer_types"] == [FULL, FULL]
    shape = "vocab_size hidden_size num_attention_heads num_key_value_heads head_dim rms_norm_eps rope_parameters"
    for key in (*shape.split(), "max_position_embeddings", "intermediate_size"):
        assert layer[key] == getattr(target, key), key
    if kind == "dspark":
        assert (config["markov_rank"], config["markov_head_type"]) == (8, "vanilla")
        assert config["enable_confidence_head"] is True and config["confidence_head_with_markov"] is True
