"""An MTP module is a layer of the target's own family: every family trains, decodes losslessly, leaves and comes back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    FalconConfig,
    Gemma4TextConfig,
    GPT2Config,
    Llama4TextConfig,
    MambaConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    StableLmConfig,
)
from transformers.masking_utils import create_causal_mask

from data_pipelines.engines import build_engine
from data_pipelines.engines.anatomy import anatomy
from data_pipelines.errors import UserError
from data_pipelines.features import FeatureSpec
from data_pipelines.packing import Document, Pack
from tests.trainer.families import EXPERTS, FAMILIES, NATIVE, SHAPE, build_target
from trainer.batch import Batch
from trainer.decoding.chain import decode_chain, decode_plain
from trainer.drafters import build_drafter
from trainer.drafters.attention import RolloutAttention
from trainer.drafters.dflash import DFlashConfig
from trainer.drafters.eagle3 import Eagle3Config
from trainer.drafters.family import Family
from trainer.drafters.mtp import MTPConfig
from trainer.export.config import ExportConfig
from trainer.export.speculators import export_drafter, load_export
from trainer.target import FrozenTarget

ALL = {**FAMILIES, **NATIVE}
STEPS, NEW = 3, 12


@pytest.fixture(scope="module", params=ALL)
def target(request, tmp_path_factory):
    return build_target(ALL[request.param](), tmp_path_factory.mktemp(request.param))


def make_drafter(target, **options):
    torch.manual_seed(3)
    return build_drafter(MTPConfig(steps=STEPS, loss="ce + kl", warm_start="never", **options), target.config, None)


def features(target):
    rng = np.random.default_rng(0)
    documents = tuple(
        Document(rng.integers(0, target.config.vocab_size, n).astype(np.int32), np.arange(n) > 1) for n in (11, 1, 8)
    )
    pack = Pack(documents)
    spec = FeatureSpec("tests", (), target.config.hidden_size, "float32")
    computed = build_engine(target, spec).compute(pack.input_ids, pack.lengths)
    return Batch.of(pack, computed, dtype=torch.float32, device="cpu", address=(0,))


@pytest.mark.parametrize("form", ["shared", "chained"])
def test_features_training_step_lossless_decode_export(target, tmp_path, form):
    frozen = FrozenTarget.load(target, torch.float32)
    drafter, batch = make_drafter(target, form=form), features(target)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    losses = []
    for _ in range(6):
        targets = drafter.targets(batch, frozen)
        weights = torch.tensor(drafter.step_weights) / targets.denominators.float()
        loss, _ = drafter(batch, targets, frozen, weights)
        loss.backward()
        for name, p in drafter.named_parameters():
            assert p.grad is not None and torch.isfinite(p.grad).all(), name
            assert p.grad.any() or "expert" in name, name  # an expert may have got no token
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]

    out = export_drafter(drafter, frozen, target, ExportConfig(dtype="float32"), tmp_path / "export", STEPS)
    again = load_export(out, target.config)
    assert again.state_dict().keys() == drafter.state_dict().keys()
    assert all(torch.equal(tensor, drafter.state_dict()[name]) for name, tensor in again.state_dict().items())
    assert again.config.form == form and again.depth == STEPS

    model = target.load_model(torch.float32)
    prompts = [[5, 17, 3, 80, 2], [9], list(range(20, 33))]
    drafter.eval()
    plain = decode_plain(model, prompts, max_new_tokens=NEW)
    decoded = decode_chain(model, prompts, drafter, frozen, draft_tokens=STEPS, max_new_tokens=NEW)
    assert [d.tokens for d in decoded] == [d.tokens for d in plain]
    assert decode_chain(model, prompts, again, frozen, draft_tokens=STEPS, max_new_tokens=NEW) == decoded


def test_the_layer_computes_what_the_familys_own_model_computes(target):
    """Our attention inside the family's layer, against transformers' own attention and mask in the same layer."""
    torch.manual_seed(5)
    model = target.load_model(torch.float32)
    family = Family(target.config)
    theirs = anatomy(model).layers[family.index]
    ours = family.layer_class(family.config, family.index)
    ours.load_state_dict(theirs.state_dict())
    hidden, positions = torch.randn(1, 17, target.config.hidden_size), torch.arange(17)[None]
    mask = create_causal_mask(model.config, hidden, None, None, position_ids=positions)
    rope = family.rotary()(positions)
    with torch.no_grad():
        expected = theirs(hidden, position_embeddings=rope, attention_mask=mask)
        strategy = RolloutAttention(torch.zeros(17, dtype=torch.long), torch.arange(17))
        got = ours(hidden, position_embeddings=rope, attention_mask=None, draft_attention=strategy)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


def test_frequencies_stay_fp32(target):
    drafter = make_drafter(target)
    before = [buffer.clone() for buffer in drafter.rotary.buffers()]
    drafter.to(torch.bfloat16)
    after = list(drafter.rotary.buffers())
    assert before and all(torch.equal(a, b) and b.dtype == torch.float32 for a, b in zip(before, after))
    assert all(table.dtype == torch.float32 for table in drafter.rotary(torch.arange(4)))


def test_hybrid_targets_give_their_last_full_attention_layer():
    linear = {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    kinds = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    for kind in (Qwen3_5TextConfig, Qwen3NextConfig):
        config = kind(**{**SHAPE, **EXPERTS, **linear, "layer_types": kinds, "shared_expert_intermediate_size": 24})
        drafter = build_drafter(MTPConfig(steps=2), config, None)
        assert Family(config).index == 1
        assert hasattr(drafter.mtp_layers[0], "self_attn") and not hasattr(drafter.mtp_layers[0], "linear_attn")


GEMMA4 = {**SHAPE, "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 16}
REFUSED = {
    "no rotary positions": (GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4), "no layer with full attention and"),
    "linear attention only": (
        Qwen3NextConfig(**SHAPE, **EXPERTS, layer_types=["linear_attention"] * 4),
        "no layer with full attention and",
    ),
    "no attention at all": (MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2), "no layer with full"),
    "embeddings for each layer": (
        Gemma4TextConfig(**GEMMA4, hidden_size_per_layer_input=8, vocab_size_per_layer_input=96),
        "a gemma4_text target cannot be run as an MTP head",
    ),
    "positions that are no cos and sin": (
        Llama4TextConfig(**{**SHAPE, "num_local_experts": 2}, intermediate_size_mlp=24),
        "a llama4_text target cannot be run",
    ),
    "an attention of its own": (FalconConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
                                "a falcon target cannot be run"),
    "an attention that is not told": (StableLmConfig(**SHAPE), "a stablelm target cannot be run"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_imitated_is_refused_in_words(name):
    config, said = REFUSED[name]
    with pytest.raises(UserError, match=said) as refused:
        build_drafter(MTPConfig(steps=2), config, None)
    assert "drafter=eagle3" in str(refused.value)
    for other in (Eagle3Config(steps=2, taps=[1]), DFlashConfig(mask_token=0, taps=[1])):  # as is said there
        build_drafter(other, config, None)


def test_a_layer_that_computes_something_else_than_causal_attention_is_refused(monkeypatch):
    """Found by running it, whatever the family: here one whose layers see a row less than they are told."""
    narrow = RolloutAttention.__init__
    monkeypatch.setattr(
        RolloutAttention,
        "__init__",
        lambda self, first, last, *rest: narrow(self, first, (last - 1).clamp(min=0), *rest),
    )
    with pytest.raises(UserError, match="a llama target cannot be run") as refused:
        build_drafter(MTPConfig(steps=2), FAMILIES["llama"](), None)
    assert "causal attention gives other states than its own does" in str(refused.value)


def test_gemma4_without_embeddings_for_each_layer_is_imitated():
    config = Gemma4TextConfig(**GEMMA4, hidden_size_per_layer_input=0, num_kv_shared_layers=2)
    assert Family(config).index == 1  # the last full layer with keys of its own
    drafter = build_drafter(MTPConfig(steps=2), config, None)
    assert drafter.mtp_layers[0].self_attn.k_proj.out_features == 2 * 16
