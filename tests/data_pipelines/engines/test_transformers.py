"""The engine's features are transformers' own hidden states, and packed documents do not see each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from data_pipelines.engines import TargetConfig, build_engine, resolve_target
from data_pipelines.errors import UserError
from data_pipelines.features import FeatureSpec
from trainer.target import FrozenTarget

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "gemma2": Gemma2Config(**SIZES, sliding_window=4),
}


@pytest.fixture(params=FAMILIES, scope="module")
def target(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[request.param])
    with torch.no_grad():  # norms other than 1, so that a wrong convention shows
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.3 * torch.randn_like(p))
    model.save_pretrained(folder)
    return resolve_target(TargetConfig(path=str(folder)))


def test_taps_and_final_are_transformers_hidden_states(target):
    spec = FeatureSpec(target.fingerprint, (0, 1, 3, 4), 32, "float32")
    lengths, rng = (5, 11, 7), np.random.default_rng(0)
    ids = rng.integers(0, 97, sum(lengths)).astype(np.int32)
    features = build_engine(target, spec).compute(ids, lengths)
    model, start = target.load_model(torch.float32), 0
    for n in lengths:
        with torch.no_grad():
            states = model(torch.from_numpy(ids[start : start + n]).long()[None], output_hidden_states=True)
        mine = features.taps[start : start + n]
        for i, k in enumerate((0, 1, 3)):
            torch.testing.assert_close(mine[:, i], states.hidden_states[k][0], rtol=1e-4, atol=1e-5)
        frozen = FrozenTarget.load(target, torch.float32)
        final = features.final[start : start + n]
        assert torch.equal(final, mine[:, 3])  # H^L is the state before the final norm …
        torch.testing.assert_close(frozen.normed(final), states.hidden_states[-1][0], rtol=1e-4, atol=1e-5)
        logits = frozen.readout.logits(frozen.normed(final))
        torch.testing.assert_close(logits, states.logits[0], rtol=1e-3, atol=1e-4)  # … and the tail is the target's own
        start += n


def test_drafters_embed_the_plain_rows(target):
    """As engines do for a drafter, also where the model itself scales its embedding."""
    model, frozen = target.load_model(torch.float32), FrozenTarget.load(target, torch.float32)
    ids = torch.arange(20)
    assert torch.equal(frozen.embed(ids), model.get_input_embeddings().weight[ids])


def test_the_same_pack_gives_the_same_bits(tiny_target):
    spec = FeatureSpec(tiny_target.fingerprint, (2, 3), tiny_target.config.hidden_size, "bfloat16")
    ids = np.arange(40, dtype=np.int32)
    a, b = (build_engine(tiny_target, spec).compute(ids, (15, 25)) for _ in range(2))
    assert torch.equal(a.taps, b.taps) and torch.equal(a.final, b.final)


def test_an_architecture_that_mixes_packed_documents_is_computed_document_by_document(tiny_target, monkeypatch):
    from data_pipelines.engines import transformers as engine

    monkeypatch.setattr(engine, "position_ids", lambda lengths: np.arange(sum(lengths), dtype=np.int32))
    spec = FeatureSpec(tiny_target.fingerprint, (2, 3), tiny_target.config.hidden_size, "float32")
    mixing = build_engine(tiny_target, spec)
    ids = np.arange(3, 14, dtype=np.int32)
    packed, alone = mixing.compute(ids, (4, 1, 6)), mixing.compute(ids[5:], (6,))
    assert torch.equal(packed.final[5:], alone.final) and torch.equal(packed.taps[5:], alone.taps)


SCALED = {**SIZES, "max_position_embeddings": 128}
LENGTH_DEPENDENT = {
    "longrope": Phi3Config(
        **{k: v for k, v in SCALED.items() if k != "head_dim"},
        original_max_position_embeddings=32,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
        },
        pad_token_id=0,
    ),
    "dynamic": LlamaConfig(
        **{**SCALED, "max_position_embeddings": 32},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    ),
}


@pytest.mark.parametrize("family", LENGTH_DEPENDENT)
def test_a_long_document_changes_no_other_one(family, tmp_path):
    """RoPE factors that depend on the longest document of a row, or on one that came before it."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LENGTH_DEPENDENT[family]).save_pretrained(tmp_path)
    target = resolve_target(TargetConfig(path=str(tmp_path)))
    spec, rng = FeatureSpec(target.fingerprint, (1, 2), 32, "float32"), np.random.default_rng(0)
    engine, fresh = build_engine(target, spec), [build_engine(target, spec) for _ in range(5)]
    assert "one by one if a document has 32 tokens" in engine.packing.says
    lengths = (10, 90, 31, 70, 32)
    documents = [rng.integers(1, 97, n).astype(np.int32) for n in lengths]
    packed = engine.compute(np.concatenate(documents), lengths)
    alone = [other.compute(document, (len(document),)) for other, document in zip(fresh, documents)]
    assert torch.equal(packed.final, torch.cat([features.final for features in alone]))
    assert torch.equal(packed.taps, torch.cat([features.taps for features in alone]))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"path": "/no/such/folder"}, "does not exist"),
        ({"path": "no-such-model"}, "does not exist"),
        ({"path": ""}, "target=hf needs a model"),
        ({"kind": "gguf"}, "not one of hf"),
        ({"path": "x/y", "dtype": "fp8"}, "not one of auto"),
    ],
)
def test_targets_that_are_not_there(config, said):
    with pytest.raises(UserError, match=said):
        resolve_target(TargetConfig(**config))


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        resolve_target(TargetConfig(path=str(tmp_path)))


def test_a_folder_without_weights(tmp_path):
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="holds no weights"):
        resolve_target(TargetConfig(path=str(tmp_path)))


def test_a_target_without_a_tokenizer(tmp_path):
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="tokenizer cannot be loaded"):
        resolve_target(TargetConfig(path=str(tmp_path))).load_tokenizer()


def test_weights_in_another_format_count_in_the_fingerprint(tmp_path):
    """Two targets that differ in `pytorch_model.bin` alone are two targets."""
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    prints = set()
    for seed in (0, 1):
        torch.manual_seed(seed)
        torch.save(AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).state_dict(), tmp_path / "pytorch_model.bin")
        target = resolve_target(TargetConfig(path=str(tmp_path)))
        prints.add(target.fingerprint)
    assert len(prints) == 2
    model, frozen = target.load_model(torch.float32), FrozenTarget.load(target, torch.float32)
    assert torch.equal(frozen.head_weight, model.lm_head.weight)


def test_another_target_has_another_fingerprint(tiny_target, tmp_path):
    model = tiny_target.load_model(torch.float32)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    model.save_pretrained(tmp_path)
    other = resolve_target(TargetConfig(path=str(tmp_path)))
    assert AutoConfig.from_pretrained(tmp_path).hidden_size == tiny_target.config.hidden_size
    assert other.fingerprint != tiny_target.fingerprint
