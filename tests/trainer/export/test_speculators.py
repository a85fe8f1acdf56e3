"""What is exported is what `speculators` loads: the same tensors, the same logits; and it can be read back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import speculators.models.eagle3.core as eagle3_core
import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.losses import resolve_loss_config
from transformers import Qwen3Config, Qwen3ForCausalLM

from data_pipelines.engines import Target
from data_pipelines.engines.anatomy import tap_hidden_states
from data_pipelines.errors import UserError
from tests.trainer.conftest import slice_batch
from trainer.batch import Batch
from trainer.drafters import build_drafter
from trainer.drafters.base import Drafter
from trainer.drafters.eagle3 import Eagle3Config
from trainer.export.config import ExportConfig
from trainer.export.speculators import export_drafter, load_export
from trainer.target import FrozenTarget

STEPS = 3
SLIDING = "sliding_attention"
VARIANTS = {
    "plain": {},
    "fc_norm": {"fc_norm": True},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True},
    "eagle 3.1": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "two layers": {"num_layers": 2},
    "two taps": {"taps": [1, 4]},
    "four taps, the last one final": {"taps": [0, 2, 3, 6], "norm_before_fc": True},
    "reduced vocabulary": {"draft_vocab_size": 100},
    "trained head": {"train_head": True, "draft_vocab_size": 64},
    "sliding layers": {"sliding_window": 4, "num_layers": 2},
    "a sliding and a full layer": {"sliding_window": 3, "num_layers": 2, "layer_types": [SLIDING, "full_attention"]},
    "a shape of its own": {"heads": 8, "kv_heads": 4, "head_dim": 6, "mlp_width": 40, "activation": "gelu"},
}


@pytest.fixture(scope="module")
def frozen(tiny_target: Target) -> FrozenTarget:
    return FrozenTarget.load(tiny_target, torch.float32)


def make_drafter(target: Target, frozen: FrozenTarget, options: dict) -> Drafter:
    """A drafter in which no tensor has a value that a loader would have given it."""
    torch.manual_seed(0)
    config = Eagle3Config(**{"taps": [2, 3, 5], "steps": STEPS, **options})
    kept = None
    if config.draft_vocab_size:
        kept = torch.randperm(target.config.vocab_size)[: config.draft_vocab_size].sort().values
    drafter = build_drafter(config, target.config, kept)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return drafter.eval()


@pytest.fixture(scope="module")
def batch(tiny_target: Target) -> Batch:
    """Two documents in one pack, with the target's own features; taps are chosen per variant."""
    ids = torch.randint(0, tiny_target.config.vocab_size, (23,), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(14), torch.arange(9)])
    model = tiny_target.load_model(torch.float32)
    layers = tuple(range(tiny_target.config.num_hidden_layers + 1))
    with tap_hidden_states(model, layers) as recorder:
        model(ids[None], position_ids=positions[None], use_cache=False)
    return Batch(
        input_ids=ids,
        document_ids=torch.cat([torch.zeros(14), torch.ones(9)]).long(),
        positions=positions,
        supervised=torch.ones(23, dtype=torch.bool),
        taps=recorder.taps[0],
        final=recorder.final[0],
    )


def judge(path: Path) -> SpeculatorModel:
    config = SpeculatorModelConfig.from_pretrained(path)
    config.transformer_layer_config._attn_implementation = "eager"  # its default wants a compiler
    return SpeculatorModel.from_pretrained(path, config=config).eval()


def move_their_window(monkeypatch, window: int) -> None:
    """Theirs leaves a window at later steps where step 0 had it. A decoder counts positions: the query is a position further
    with each step, and so is its window."""
    extend = eagle3_core.extend_dense_mask_for_draft_tokens

    def moved(mask, size):
        step, index = mask.shape[-1] // size, torch.arange(size)
        mask = extend(mask, size)
        if mask[0, 0, 12, 0].isinf():  # it is a window's mask: a late row does not see its document's first
            hidden = index[:, None] - index >= window - step
            mask[..., :size].masked_fill_(hidden, float("-inf"))
        return mask

    monkeypatch.setattr(eagle3_core, "extend_dense_mask_for_draft_tokens", moved)


@pytest.mark.parametrize("variant", VARIANTS)
def test_speculators_computes_the_same(tiny_target, frozen, batch, tmp_path, monkeypatch, variant):
    if window := VARIANTS[variant].get("sliding_window"):
        move_their_window(monkeypatch, window)
    drafter = make_drafter(tiny_target, frozen, VARIANTS[variant])
    cfg = ExportConfig(dtype="float32", verifier=tiny_target.path)
    theirs = judge(export_drafter(drafter, frozen, tiny_target, cfg, tmp_path / "export", STEPS))

    stored = load_file(tmp_path / "export" / "model.safetensors")
    loaded = {k: v for k, v in theirs.state_dict().items() if not k.startswith("verifier_")}
    assert loaded.keys() == stored.keys()
    for name in stored:
        assert loaded[name].dtype == stored[name].dtype and torch.equal(loaded[name], stored[name]), name
    ours = drafter.state_dict()
    assert ours.keys() <= stored.keys() and all(torch.equal(ours[name], stored[name]) for name in ours)
    assert stored.keys() - ours.keys() <= {"embed_tokens.weight", "lm_head.weight"}
    assert torch.equal(stored["embed_tokens.weight"], frozen.embedding_weight)

    # Every step of the same batch. Row t takes the token after it, up to the last row of which all labels exist.
    taps = batch.taps[:, list(drafter.taps)]
    logits = []
    theirs.lm_head.register_forward_hook(lambda _, args, output: logits.append(output[0]))
    with torch.no_grad():
        theirs(
            hidden_states=taps.flatten(1)[None],
            input_ids=batch.input_ids.roll(-1)[None],
            document_ids=batch.document_ids[None],
            position_ids=1 + batch.positions[None],
            ttt_steps=STEPS,
        )
        rows = torch.cat([torch.arange(14 - STEPS), 14 + torch.arange(9 - STEPS)])
        pack = Batch(batch.input_ids, batch.document_ids, batch.positions, batch.supervised, taps, batch.final)
        outputs = drafter.roll_out(pack, frozen, [rows] * STEPS)
        for output, expected in zip(outputs, logits, strict=True):
            torch.testing.assert_close(output @ drafter.head(frozen).T, expected[rows], atol=2e-4, rtol=1e-4)


def both_losses(drafter, theirs, frozen, document: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours and speculators' KL loss on one document, in their layout: row t has x_{t+1}, the taps at t, the final state at
    t+1 and the mask of x_{t+1}."""
    mask = document.supervised[1:].clone()
    mask[-1] = False  # their last target is the distribution of a token past the end of the document
    taps = document.taps[:, list(drafter.taps)]
    with torch.no_grad():
        _, loss, _ = theirs(
            hidden_states=taps[:-1].flatten(1)[None],
            input_ids=document.input_ids[1:][None],
            document_ids=document.document_ids[1:][None],
            loss_mask=mask[None],
            position_ids=document.positions[1:][None],
            verifier_last_hidden_states=document.final[1:][None],
            ttt_steps=STEPS,
            ttt_step_loss_decay=drafter.config.step_weight,
            loss_config=resolve_loss_config("kl_div", "eager"),
        )
        pack = replace(document, taps=taps)
        targets = drafter.targets(pack, frozen)
        weights = torch.tensor(drafter.step_weights) / targets.denominators
        ours, _ = drafter(pack, targets, frozen, weights.float())
    return ours, loss


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_loss_where_the_definitions_agree(tiny_target, frozen, batch, tmp_path, monkeypatch, variant):
    """One document, every token supervised. (Drafts whose teacher lies outside a reduced vocabulary: they train them.)"""
    if window := VARIANTS[variant].get("sliding_window"):
        move_their_window(monkeypatch, window)
    drafter = make_drafter(tiny_target, frozen, {"loss": "kl", "keep_unmapped": True, **VARIANTS[variant]})
    cfg = ExportConfig(dtype="float32", verifier=tiny_target.path)
    theirs = judge(export_drafter(drafter, frozen, tiny_target, cfg, tmp_path / "export", STEPS))
    ours, expected = both_losses(drafter, theirs, frozen, slice_batch(batch, 0, 14))
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_where_we_differ_on_purpose(tiny_target, frozen, batch, tmp_path):
    """They mask by the bonus token, we by the whole round: an answer that ends inside the document makes them train what
    comes after its end, and rounds that began before it. On one that is supervised throughout the two agree (above)."""
    drafter = make_drafter(tiny_target, frozen, {"loss": "kl"})
    cfg = ExportConfig(dtype="float32", verifier=tiny_target.path)
    theirs = judge(export_drafter(drafter, frozen, tiny_target, cfg, tmp_path / "export", STEPS))
    document = slice_batch(batch, 0, 14)
    answer = torch.zeros(14, dtype=torch.bool)
    answer[4:10] = True
    ours, expected = both_losses(drafter, theirs, frozen, replace(document, supervised=answer))
    assert (ours - expected).abs() > 1e-2


def test_a_window_moves_on_with_the_steps_on_purpose(tiny_target, frozen, batch, tmp_path):
    """Theirs does not: from step 1 on it sees a position that is outside the window when engines decode."""
    drafter = make_drafter(tiny_target, frozen, {"loss": "kl", "sliding_window": 4})
    cfg = ExportConfig(dtype="float32", verifier=tiny_target.path)
    theirs = judge(export_drafter(drafter, frozen, tiny_target, cfg, tmp_path / "export", STEPS))
    ours, expected = both_losses(drafter, theirs, frozen, slice_batch(batch, 0, 14))
    assert (ours - expected).abs() > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_read_back(tiny_target, frozen, tmp_path, variant, dtype):
    drafter = make_drafter(tiny_target, frozen, VARIANTS[variant])
    export_drafter(drafter, frozen, tiny_target, ExportConfig(dtype=dtype), tmp_path / "export", STEPS)
    again = load_export(tmp_path / "export", tiny_target.config)
    expected = {**drafter.state_dict(), "lm_head.weight": drafter.head(frozen)}
    assert again.state_dict().keys() == expected.keys()
    for name, tensor in again.state_dict().items():
        rounded = expected[name].to(getattr(torch, dtype)).float() if tensor.is_floating_point() else expected[name]
        assert torch.equal(tensor, rounded), name
    assert again.layer_types == drafter.layer_types and again.layer_config.to_dict() == drafter.layer_config.to_dict()
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "num_layers", "sliding_window"):
        assert getattr(again.config, key) == getattr(drafter.config, key)
    assert again.taps == drafter.taps
    assert (again.kept is None) == (drafter.kept is None)
    assert again.kept is None or torch.equal(again.kept, drafter.kept)


def test_config(tiny_target, frozen, tmp_path):
    """The keys that engines read, at their places."""
    drafter = make_drafter(tiny_target, frozen, {"taps": [1, 4], "draft_vocab_size": 100})
    export_drafter(drafter, frozen, tiny_target, ExportConfig(), tmp_path / "export", 5)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    assert "model_type" not in config  # vLLM reads the speculators config only in its absence
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": tiny_target.name,
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["dtype"] == "bfloat16" and config["tie_word_embeddings"] is False
    assert config["draft_vocab_size"] == 100
    layer, target = config["transformer_layer_config"], tiny_target.config
    assert layer["model_type"] == "llama" and layer["num_hidden_layers"] == 1
    assert layer["num_aux_hidden_states"] == 2
    keys = "vocab_size hidden_size num_attention_heads num_key_value_heads head_dim rms_norm_eps rope_parameters"
    for key in (*keys.split(), "max_position_embeddings", "intermediate_size"):
        assert layer[key] == getattr(target, key), key
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    kept = torch.arange(100) + tensors["d2t"]
    assert torch.equal(kept, drafter.kept) and torch.equal(tensors["t2d"].nonzero().squeeze(1), kept)
    assert torch.equal(tensors["lm_head.weight"], frozen.head_weight[kept].bfloat16())


def test_full_vocabulary_has_no_map(tiny_target, frozen, tmp_path):
    export_drafter(make_drafter(tiny_target, frozen, {}), frozen, tiny_target, ExportConfig(), tmp_path / "export", 3)
    assert not {"d2t", "t2d"} & load_file(tmp_path / "export" / "model.safetensors").keys()


def test_an_earlier_export_is_replaced_whole(tiny_target, frozen, tmp_path):
    out = tmp_path / "export"
    export_drafter(make_drafter(tiny_target, frozen, {}), frozen, tiny_target, ExportConfig(), out, 3)
    (out / "stale").touch()
    bad = make_drafter(tiny_target, frozen, {})
    with torch.no_grad():
        bad.fc.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"fc\.weight holds values that are not finite"):
        export_drafter(bad, frozen, tiny_target, ExportConfig(), out, 3)
    assert (out / "stale").exists()  # a refused export leaves the earlier one
    export_drafter(make_drafter(tiny_target, frozen, {}), frozen, tiny_target, ExportConfig(dtype="float32"), out, 3)
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
    assert all(p.stat().st_mode & 0o777 == 0o644 for p in out.iterdir())  # engines may run as another user
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_what_is_no_export(tiny_target, frozen, tmp_path):
    with pytest.raises(UserError, match="not an exported drafter"):
        load_export(tmp_path / "nowhere", tiny_target.config)
    out = export_drafter(make_drafter(tiny_target, frozen, {}), frozen, tiny_target, ExportConfig(), tmp_path / "e", 3)
    weights = out / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(UserError, match="not an exported drafter"):
        load_export(out, tiny_target.config)
    weights.write_bytes(whole)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "speculators_model_type": "medusa"}))
    with pytest.raises(UserError, match="medusa"):
        load_export(out, tiny_target.config)


def test_dtype_is_checked():
    with pytest.raises(UserError, match=r"export\.dtype=int8"):
        ExportConfig(dtype="int8")


def test_a_family_that_norms_queries_and_keys_is_followed(tiny_target, tmp_path):
    """A Qwen3 target: its drafter has these norms, speculators builds them from the export, and the loss is the same."""
    torch.manual_seed(5)
    size = {key: getattr(tiny_target.config, key) for key in ("vocab_size", "hidden_size", "intermediate_size")}
    heads = {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    Qwen3ForCausalLM(Qwen3Config(**size, **heads, tie_word_embeddings=False)).save_pretrained(tmp_path / "target")
    target = Target(str(tmp_path / "target"), "qwen3")
    frozen = FrozenTarget.load(target, torch.float32)
    drafter = make_drafter(target, frozen, {"loss": "kl", "taps": [2, 3, 5], "num_layers": 2})
    assert {"layers.0.self_attn.q_norm.weight", "layers.1.self_attn.k_norm.weight"} <= drafter.state_dict().keys()
    cfg = ExportConfig(dtype="float32", verifier=target.path)
    theirs = judge(export_drafter(drafter, frozen, target, cfg, tmp_path / "export", STEPS))
    ids, size = torch.randint(0, target.config.vocab_size, (14,)), target.config.hidden_size
    document = Batch(
        input_ids=ids,
        document_ids=torch.zeros(14, dtype=torch.long),
        positions=torch.arange(14),
        supervised=torch.ones(14, dtype=torch.bool),
        taps=torch.randn(14, 7, size),
        final=torch.randn(14, size),
    )
    torch.testing.assert_close(*both_losses(drafter, theirs, frozen, document), atol=1e-4, rtol=1e-4)
    again = load_export(tmp_path / "export", target.config)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in drafter.state_dict().items())
