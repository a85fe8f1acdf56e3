"""The readout that is measured is the one that the family's own code computes; what it cannot explain is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    FalconH1Config,
    Gemma2Config,
    GraniteConfig,
    HyperCLOVAXConfig,
    LlamaConfig,
    MiniCPM3Config,
    PhiConfig,
)

from data_pipelines.engines import TargetConfig, resolve_target
from data_pipelines.engines.readout import measure_readout
from data_pipelines.errors import UserError
from trainer.target import FrozenTarget

SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
# Config, then the scale and the cap that its modeling code applies to the logits.
FAMILIES = {
    "llama": (LlamaConfig(**SHAPE), 1.0, None),
    "granite divides": (GraniteConfig(**SHAPE, logits_scaling=8.0, embedding_multiplier=12.0), 1 / 8, None),
    "hyperclovax multiplies": (HyperCLOVAXConfig(**SHAPE, logits_scaling=0.125), 0.125, None),
    "cohere2": (Cohere2Config(**SHAPE, logit_scale=0.0625), 0.0625, None),
    "falcon_h1": (FalconH1Config(**SHAPE, **MAMBA, lm_head_multiplier=0.0195), 0.0195, None),
    "minicpm3 scales before the head": (
        MiniCPM3Config(**{**SHAPE, "num_key_value_heads": 4}, **MLA, dim_model_base=8),
        1 / 4,
        None,
    ),
    "gemma2": (Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=3.0), 1.0, 3.0),
    "gemma2 whose cap is out of reach": (Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=9e4), 1.0, 9e4),
    "phi has a bias": (PhiConfig(**SHAPE), 1.0, None),
}


@pytest.fixture(params=FAMILIES, scope="module")
def family(request, tmp_path_factory):
    config, scale, softcap = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("family")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # norms of 1 and biases of 0 would hide what is left out
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(0.3 * torch.randn_like(p))
    model.save_pretrained(folder)
    return resolve_target(TargetConfig(path=str(folder))), scale, softcap


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale_cap_and_bias_are_the_familys(family, dtype):
    target, scale, softcap = family
    frozen = FrozenTarget.load(target, dtype)
    assert frozen.readout.scale == scale and frozen.readout.softcap == softcap
    assert (frozen.readout.bias is not None) == (target.config.model_type == "phi")


def test_the_whole_model_and_its_tail_have_one_readout(family):
    """What a rank computes from three modules is what the whole model, which nobody loads there, writes."""
    target, _, _ = family
    model, frozen = target.load_model(torch.float32), FrozenTarget.load(target, torch.float32)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        output = model.base_model(ids)
        real = model(ids).logits[0]
        # `last_hidden_state` comes after the final norm.
        ours = frozen.readout.logits(output.last_hidden_state[0])
    assert (ours - real).abs().max() <= 1e-4
    whole, error = measure_readout(model)
    assert (whole.scale, whole.softcap) == (frozen.readout.scale, frozen.readout.softcap) and error < 1e-5


def test_rows_of_a_draft_vocabulary_take_their_own_bias(family):
    target, _, _ = family
    frozen, kept = FrozenTarget.load(target, torch.float32), torch.tensor([3, 5, 90])
    g = torch.randn(4, 32)
    torch.testing.assert_close(frozen.draft_readout(kept).logits(g), frozen.readout.logits(g)[:, kept])


def test_logits_that_head_and_norm_do_not_explain_are_refused(family):
    target, _, _ = family
    model = target.load_tail(torch.float32)
    plain = model.forward

    def squared(*args, **kwargs):
        output = plain(*args, **kwargs)
        output.logits = output.logits + 0.1 * output.logits.square()
        return output

    model.forward = squared
    with pytest.raises(UserError, match=r"logits of .* are not those of its final norm and head"):
        FrozenTarget(model)
