"""Quantised checkpoints: a rank reads its three modules from them; a producer loads them, or says what is missing."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from data_pipelines.engines import TargetConfig, resolve_target
from data_pipelines.errors import UserError
from trainer.fit import check_target
from trainer.target import FrozenTarget

SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
GROUP = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
METHODS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": GROUP, "targets": ["Linear"]}},
        "ignore": ["lm_head"],
    },
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp8": {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}


def quantise(folder, method: dict, *, head: bool):
    """A checkpoint as such a method leaves it: packed integers in the place of the linear layers' weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, tie_word_embeddings=False))
    model.save_pretrained(folder)
    weights = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "_proj" in name or (head and name.startswith("lm_head")):
            weights[name.replace(".weight", ".qweight")] = torch.zeros(4, 8, dtype=torch.int32)
            weights[name.replace(".weight", ".scales")] = torch.ones(1, 8)
        else:
            weights[name] = tensor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    return model, resolve_target(TargetConfig(path=str(folder)))


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_reads_its_three_modules(method, tmp_path):
    model, target = quantise(tmp_path, METHODS[method], head=False)
    frozen = FrozenTarget.load(target, torch.float32)
    assert torch.equal(frozen.head_weight, model.lm_head.weight)
    assert torch.equal(frozen.embedding_weight, model.model.embed_tokens.weight)
    hidden = torch.randn(5, 32)
    torch.testing.assert_close(frozen.normed(hidden), model.model.norm(hidden))


def test_a_quantised_head_is_refused(tmp_path):
    _, target = quantise(tmp_path, METHODS["gptq"], head=True)
    with pytest.raises(UserError, match=r"does not hold lm_head\.weight in a form"):
        FrozenTarget.load(target, torch.float32)


@pytest.mark.parametrize("method", METHODS)
def test_a_producer_without_what_the_method_needs_says_so(method, tmp_path):
    """(None of these can run here: packages are missing, and the packed numbers are no weights. transformers would fill in
    random ones.)"""
    _, target = quantise(tmp_path, METHODS[method], head=False)
    fit = check_target(target)
    assert not fit.fits
    said = fit.findings[0].says
    assert len(said) > 20 and "Error" not in said.split(":")[0], said


def test_an_fp8_checkpoint_is_computed_by_a_producer_without_a_gpu(tmp_path):
    """Blocks of 32 × 32 with a scale each, as DeepSeek and Qwen publish them; transformers dequantises them on a CPU."""
    torch.manual_seed(0)
    shape = {**SHAPE, "hidden_size": 64, "intermediate_size": 96}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**shape, tie_word_embeddings=False))
    model.save_pretrained(tmp_path)
    weights, size = {}, 32
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if "_proj" in name:
            blocks = tensor.view(tensor.shape[0] // size, size, -1, size)
            scales = blocks.abs().amax((1, 3)) / 448
            packed = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
            weights[name.replace(".weight", ".weight_scale_inv")] = scales
            weights[name] = packed.reshape(tensor.shape)
            dequantised = packed.float() * scales[:, None, :, None]
            model.get_parameter(name).data.copy_(dequantised.reshape(tensor.shape))
        else:
            weights[name] = tensor
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    method = {"quant_method": "fp8", "weight_block_size": [size, size], "activation_scheme": "dynamic", "fmt": "e4m3"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    target = resolve_target(TargetConfig(path=str(tmp_path)))
    fit = check_target(target)
    assert fit.fits and fit.logit_difference <= 1e-4
    ids = torch.arange(20)[None]
    with torch.no_grad():
        ours, plain = target.load_model(torch.float32)(ids).logits, model.eval()(ids).logits
    torch.testing.assert_close(ours, plain)
