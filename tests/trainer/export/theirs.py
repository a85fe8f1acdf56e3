"""Exports that `speculators` writes with its own classes, for tests that read them."""

from __future__ import annotations

import torch
from speculators import SpeculatorModel, SpeculatorsConfig
from speculators.config import VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

from data_pipelines.engines import Target

KINDS = {
    "eagle3": (Eagle3DraftModel, Eagle3SpeculatorConfig),
    "dflash": (DFlashDraftModel, DFlashSpeculatorConfig),
    "dspark": (DSparkDraftModel, DSparkSpeculatorConfig),
}
# Nothing is the target's but what must be.
OWN = {
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 28,
    "hidden_act": "gelu",
    "rms_norm_eps": 3e-4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 777.0},
    "max_position_embeddings": 96,
}


def written(
    path, target: Target, kind: str, layers: str = "llama", *, tokens: int = 3, keys=OWN, **options
) -> SpeculatorModel:
    """A drafter with random weights, made and saved by speculators. keys: of its layers. options: of its config; what is not
    given is speculators' own default."""
    made, config = KINDS[kind]
    shape = {"vocab_size": target.config.vocab_size, "hidden_size": target.config.hidden_size}
    layer = {"llama": LlamaConfig, "qwen3": Qwen3Config}[layers](**shape, **keys)
    layer._attn_implementation = "eager"  # its default wants a compiler
    vocabulary = options.setdefault("draft_vocab_size", target.config.vocab_size)
    model = made(
        config(
            transformer_layer_config=layer,
            speculators_config=SpeculatorsConfig(
                algorithm=kind,
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=tokens)],
                default_proposal_method="greedy",
                verifier=VerifierConfig.from_pretrained(target.path),
            ),
            **options,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"):
                parameter.copy_(torch.randn_like(parameter) * 0.15 + ("norm" in name))
    if vocabulary < target.config.vocab_size:
        kept = torch.randperm(target.config.vocab_size)[:vocabulary].sort().values
        member = torch.zeros(target.config.vocab_size, dtype=torch.bool)
        member[kept] = True
        model.load_vocab_mappings(member, kept - torch.arange(vocabulary))
    model.load_verifier_weights()
    model.save_pretrained(path)
    return model.eval()
