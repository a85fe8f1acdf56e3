"""An exported MTP drafter is what `speculators` loads: the same tensors and, where the definitions agree, the same logits and
loss. Where they do not, on purpose, the difference is shown."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel, SpeculatorModelConfig

from data_pipelines.engines.anatomy import tap_hidden_states
from tests.trainer.families import FAMILIES, NATIVE, build_target
from trainer.batch import Batch, round_counts
from trainer.drafters import build_drafter
from trainer.drafters.mtp import MTPConfig
from trainer.export.config import ExportConfig
from trainer.export.speculators import export_drafter, load_export
from trainer.target import FrozenTarget

STEPS = 3
LENGTHS = (14, 9)


@pytest.fixture(scope="module", params=["qwen3", "qwen3_next"])
def target(request, tmp_path_factory):
    """Two of the families that speculators has an MTP layer of: dense, and a mixture of experts with norms of 1 + w."""
    return build_target({**FAMILIES, **NATIVE}[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def frozen(target) -> FrozenTarget:
    return FrozenTarget.load(target, torch.float32)


def make_drafter(target, **options):
    torch.manual_seed(0)
    options = {"steps": STEPS, "warm_start": "never", "attention": "own_step", **options}
    drafter = build_drafter(MTPConfig(**options), target.config, None)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return drafter.eval()


@pytest.fixture(scope="module")
def batch(target) -> Batch:
    ids = torch.randint(0, target.config.vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
    model = target.load_model(torch.float32)
    finals = []
    for document in ids.split(LENGTHS):
        with tap_hidden_states(model, ()) as recorder, torch.no_grad():
            model(document[None], use_cache=False)
        finals.append(recorder.final[0])
    return Batch(
        input_ids=ids,
        document_ids=torch.repeat_interleave(torch.arange(2), torch.tensor(LENGTHS)),
        positions=torch.cat([torch.arange(n) for n in LENGTHS]),
        supervised=torch.ones(len(ids), dtype=torch.bool),
        taps=recorder.taps[0].new_zeros(len(ids), 0, target.config.hidden_size),
        final=torch.cat(finals),
    )


def export(drafter, frozen, target, out, **options):
    cfg = ExportConfig(verifier=target.path, **{"dtype": "float32", **options})
    return export_drafter(drafter, frozen, target, cfg, out, STEPS)


def judge(path) -> SpeculatorModel:
    config = SpeculatorModelConfig.from_pretrained(path)
    config.transformer_layer_config._attn_implementation = "eager"
    return SpeculatorModel.from_pretrained(path, config=config).eval()


@pytest.mark.parametrize("concat", ["embedding_first", "hidden_first"])
def test_speculators_loads_every_tensor_and_computes_the_same(target, frozen, batch, tmp_path, concat):
    drafter = make_drafter(target, concat=concat)
    theirs = judge(export(drafter, frozen, target, tmp_path / "export"))
    stored = load_file(tmp_path / "export" / "model.safetensors")
    loaded = {k: v for k, v in theirs.state_dict().items() if k not in ("embed_tokens.weight", "lm_head.weight")}
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], stored[name]) for name in stored)
    assert torch.equal(theirs.embed_tokens.weight, frozen.embedding_weight)
    assert torch.equal(theirs.lm_head.weight, frozen.head_weight)

    # Their forward is FastMTP's own-step attention over the state that it is given: g here, as engines give it.
    with torch.no_grad():
        logits, _, _ = theirs(
            input_ids=batch.input_ids[None],
            hidden_states=frozen.normed(batch.final)[None],
            position_ids=batch.positions[None],
            step_weights=drafter.step_weights,
        )
        counts = round_counts(batch, 1, STEPS)
        rows = [c.nonzero().squeeze(1) for c in counts]
        ours = drafter.roll_out(batch, frozen, rows)
        for k in range(STEPS):
            ours[k] = ours[k] @ frozen.head_weight.T
            theirs_has = rows[k] < logits[k].shape[1]  # it ends every step where the last one ends
            assert theirs_has.sum() > 10
            torch.testing.assert_close(ours[k][theirs_has], logits[k][0, rows[k][theirs_has]], atol=2e-4, rtol=1e-4)


N = LENGTHS[0]


def document(batch: Batch, supervised: slice) -> Batch:
    """The first document alone, with that part of it supervised."""
    cut = {name: getattr(batch, name)[:N] for name in ("input_ids", "document_ids", "positions", "taps", "final")}
    mask = torch.zeros(N, dtype=torch.bool)
    mask[supervised] = True
    return replace(batch, **cut, supervised=mask)


def their_loss(drafter, frozen, target, one: Batch, folder) -> torch.Tensor:
    theirs = judge(export(drafter, frozen, target, folder / "export"))
    with torch.no_grad():
        return theirs(
            input_ids=one.input_ids[None],
            hidden_states=frozen.normed(one.final)[None],
            position_ids=one.positions[None],
            loss_mask=one.supervised[None].long(),
            step_weights=drafter.step_weights,
        )[1]


def our_loss(drafter, frozen, one: Batch, targets) -> torch.Tensor:
    with torch.no_grad():
        weights = torch.tensor(drafter.step_weights) / targets.denominators.float()
        return drafter(one, targets, frozen, weights)[0]


def test_the_same_loss_on_the_rows_that_both_train(target, frozen, batch, tmp_path):
    """One document, all of it supervised. On purpose ours also has the rows that theirs leaves out: step k can be trained up
    to k+2 tokens before the end, theirs ends every step where the last step ends."""
    one, drafter = document(batch, slice(None)), make_drafter(target)
    targets = drafter.targets(one, frozen)
    assert targets.counts.sum(1).tolist() == [N - 2 - k for k in range(STEPS)]
    common = targets.trained & (torch.arange(N) < N - STEPS - 1)
    assert common.sum(1).tolist() == [N - STEPS - 1] * STEPS
    loss = their_loss(drafter, frozen, target, one, tmp_path)
    ours = our_loss(drafter, frozen, one, replace(targets, trained=common))
    torch.testing.assert_close(ours, loss, atol=1e-4, rtol=1e-4)


def test_masked_by_the_round_not_by_the_label(target, frozen, batch, tmp_path):
    """On purpose: theirs counts every draft whose label is supervised, also of rounds whose bonus token the target has not
    written (it is still the prompt's). Such a round never happens, and ours does not train it."""
    one, prompt = document(batch, slice(5, None)), 5
    drafter = make_drafter(target)
    loss = their_loss(drafter, frozen, target, one, tmp_path)
    targets = drafter.targets(one, frozen)
    by_label = torch.zeros_like(targets.counts)
    for k in range(STEPS):
        by_label[k, : N - STEPS - 1] = one.supervised[2 + k :][: N - STEPS - 1]
        extra = by_label[k] & ~targets.counts[k]
        assert extra.nonzero().squeeze(1).tolist() == [t for t in range(N - STEPS - 1) if t + 1 < prompt <= t + 2 + k]
    by_round = replace(targets, trained=targets.counts & by_label)
    torch.testing.assert_close(
        our_loss(drafter, frozen, one, replace(targets, counts=by_label, trained=by_label)), loss, atol=1e-4, rtol=1e-4
    )
    assert (our_loss(drafter, frozen, one, by_round) - loss).abs() > 1e-2


def test_rollout_sees_what_a_decode_sees_and_theirs_does_not(target, frozen, batch):
    """On purpose: equal at step 0, other keys from step 1 on."""
    rows = [c.nonzero().squeeze(1) for c in round_counts(batch, 1, STEPS)]
    with torch.no_grad():
        own, rollout = (
            make_drafter(target, attention=a).roll_out(batch, frozen, rows) for a in ("own_step", "rollout")
        )
    torch.testing.assert_close(own[0], rollout[0])
    assert all((a - b).abs().max() > 1e-2 for a, b in zip(own[1:], rollout[1:]))


def test_config_and_names(target, frozen, tmp_path):
    export(make_drafter(target), frozen, target, tmp_path / "export", dtype="bfloat16")
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "mtp"
    assert config["architectures"] == ["MTPDraftModel"] and config["num_nextn_predict_layers"] == 1
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == STEPS
    assert config["transformer_layer_config"]["model_type"] == target.config.model_type
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "vocab_size", "layer_types")
    assert all(config["transformer_layer_config"][key] == getattr(target.config, key) for key in keys)
    size = target.config.hidden_size
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    assert tensors["mtp_layers.0.input_proj.weight"].shape == (size, 2 * size)
    norms = "hidden_layernorm token_layernorm input_layernorm post_attention_layernorm final_layernorm"
    assert all(tensors[f"mtp_layers.0.{norm}.weight"].shape == (size,) for norm in norms.split())
    assert {name.split(".")[0] for name in tensors} == {"mtp_layers"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"concat": "hidden_first"},
        {"hidden": "pre_norm"},
        {"form": "chained"},
        {"form": "chained", "concat": "hidden_first"},
    ],
    ids=str,
)
def test_read_back(target, frozen, batch, tmp_path, options):
    """In another order of the projection's input it is stored in the standard one: other tensors, the same function."""
    drafter = make_drafter(target, **options)
    again = load_export(export(drafter, frozen, target, tmp_path / "export"), target.config)
    assert (again.config.form, again.config.hidden, again.depth) == (drafter.config.form, drafter.config.hidden, STEPS)
    assert again.config.concat == "embedding_first"
    again.config.attention = drafter.config.attention
    rows = [c.nonzero().squeeze(1) for c in round_counts(batch, 1, STEPS)]
    with torch.no_grad():
        for a, b in zip(again.roll_out(batch, frozen, rows), drafter.roll_out(batch, frozen, rows), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_speculators_refuses_what_the_format_has_no_place_for(target, frozen, tmp_path):
    """A chain of modules: the format allows one."""
    out = export(make_drafter(target, form="chained"), frozen, target, tmp_path / "export")
    with pytest.raises(ValueError, match="MTP currently supports 1 layer, got 3"):
        judge(out)
