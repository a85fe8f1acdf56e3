"""Exports for targets whose families embed or read out in a way of their own: `speculators`' classes give the logits that
training saw. Gemma multiplies its embeddings by √H, Granite by 12; Granite and Cohere scale their logits; Gemma 2 caps them;
a drafter's consumers know nothing of that."""

from __future__ import annotations

import pytest
import torch
from speculators.losses import resolve_loss_config
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Cohere2Config,
    Gemma3Config,
    Gemma4TextConfig,
    GraniteConfig,
    PretrainedConfig,
    Qwen3_5TextConfig,
)

from data_pipelines.engines import Target
from tests.trainer.export.test_block_drafters import their_forward
from tests.trainer.export.test_speculators import judge
from tests.trainer.families import FAMILIES, SHAPE
from trainer.batch import Batch
from trainer.drafters import DRAFTERS, build_drafter
from trainer.drafters.mtp import MTPConfig
from trainer.export.config import ExportConfig
from trainer.export.speculators import export_drafter, load_export
from trainer.target import FrozenTarget

STEPS, TAPS = 3, [1, 2, 4]
LENGTHS = (14, 9)
GEMMA4 = {**SHAPE, "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 16}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}
WITHOUT_HEAD_SIZE = {key: value for key, value in SHAPE.items() if key != "head_dim"}
TARGETS = {
    "gemma2": FAMILIES["gemma2"],
    "gemma3": FAMILIES["gemma3"],
    "gemma3 in a multimodal model": lambda: Gemma3Config(
        text_config=FAMILIES["gemma3"]().to_dict(),
        vision_config={**VISION, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=95,
    ),
    "gemma4": lambda: Gemma4TextConfig(**GEMMA4, hidden_size_per_layer_input=0),
    "gemma4 with embeddings for each layer": lambda: Gemma4TextConfig(
        **GEMMA4, hidden_size_per_layer_input=8, vocab_size_per_layer_input=96
    ),
    "granite": lambda: GraniteConfig(**WITHOUT_HEAD_SIZE, logits_scaling=8.0, embedding_multiplier=12.0),
    "cohere2": lambda: Cohere2Config(**SHAPE, logit_scale=1 / 16),
}
BLOCK = {"num_layers": 2, "block_size": 4, "mask_token": 90, "taps": TAPS}
OPTIONS = {
    "eagle3": {"steps": STEPS, "taps": TAPS},
    "dflash": BLOCK,
    "dspark": {**BLOCK, "markov_rank": 8},
}


def save(config: PretrainedConfig, folder) -> Target:
    torch.manual_seed(0)
    wrapped = hasattr(config, "text_config")
    auto = AutoModelForImageTextToText if wrapped else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.1)
    model.save_pretrained(folder)
    return Target(str(folder), "tests/target")


@pytest.fixture(scope="module", params=TARGETS)
def target(request, tmp_path_factory) -> Target:
    return save(TARGETS[request.param](), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def frozen(target) -> FrozenTarget:
    return FrozenTarget.load(target, torch.float32)


def make_drafter(target: Target, frozen: FrozenTarget, config):
    torch.manual_seed(1)
    drafter = build_drafter(config, target.config, None)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    drafter.start_head(frozen)
    return drafter.eval()


def batch() -> Batch:
    """Any states will do: what is compared is what becomes of them."""
    n, size = sum(LENGTHS), SHAPE["hidden_size"]
    generator = torch.Generator().manual_seed(3)
    return Batch(
        input_ids=torch.randint(0, SHAPE["vocab_size"], (n,), generator=generator),
        document_ids=torch.repeat_interleave(torch.arange(2), torch.tensor(LENGTHS)),
        positions=torch.cat([torch.arange(k) for k in LENGTHS]),
        supervised=torch.ones(n, dtype=torch.bool),
        taps=torch.randn(n, len(TAPS), size, generator=generator),
        final=torch.randn(n, size, generator=generator),
    )


def both_logits(drafter, frozen, theirs, monkeypatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ours and theirs, of each step or of all slots."""
    pack, name = batch(), drafter.config.name
    if name == "eagle3":
        logits = []
        theirs.lm_head.register_forward_hook(lambda _, args, output: logits.append(output[0]))
        theirs(
            hidden_states=pack.taps.flatten(1)[None],
            input_ids=pack.input_ids.roll(-1)[None],
            document_ids=pack.document_ids[None],
            position_ids=1 + pack.positions[None],
            ttt_steps=STEPS,
        )
        rows = torch.cat([torch.arange(14 - STEPS), 14 + torch.arange(9 - STEPS)])
        outputs = drafter.roll_out(pack, frozen, [rows] * STEPS)
        return [(ours @ drafter.head(frozen).T, x[rows]) for ours, x in zip(outputs, logits, strict=True)]
    anchors = torch.tensor([0, 1, 3, 8, 9, 14, 17, 18])
    loss = resolve_loss_config("tv", "eager")
    extra = {"tv_loss_fn": loss["tv"][0]} if name == "dspark" else {}
    seen, _ = their_forward(theirs, drafter, pack, anchors, monkeypatch, loss_config=loss, **extra)
    hidden = drafter.train_blocks(pack, frozen, anchors)
    previous = pack.input_ids[anchors[:, None] + torch.arange(drafter.depth)]
    states, head = drafter.read_out(hidden, previous, frozen)
    size, first = drafter.config.block_size, drafter.config.block_size - drafter.depth
    return [(states @ head.T, seen["logits"].view(len(anchors), size, -1)[:, first:])]


@pytest.mark.parametrize("name", OPTIONS)
def test_speculators_computes_what_was_trained(target, frozen, tmp_path, monkeypatch, name):
    drafter = make_drafter(target, frozen, DRAFTERS[name].Config(**OPTIONS[name]))
    cfg = ExportConfig(dtype="float32", verifier=target.path)
    out = export_drafter(drafter, frozen, target, cfg, tmp_path / "export", drafter.depth)
    theirs = judge(out)
    assert torch.equal(theirs.embed_tokens.weight, frozen.embedding_weight)
    with torch.no_grad():
        for ours, expected in both_logits(drafter, frozen, theirs, monkeypatch):
            assert ours.std() > 0.05
            assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max().clamp(min=1)
    again = load_export(out, target.config)
    assert again.layer_config.to_dict() == drafter.layer_config.to_dict()
    assert all(torch.equal(again.state_dict()[key], tensor) for key, tensor in drafter.state_dict().items())


def test_an_embedding_as_the_family_scales_it_would_be_noticed(target, frozen, tmp_path, monkeypatch):
    """What DFlash's blocks were trained on before: it is off by far more than the test above allows."""
    gemma = target.config.model_type.startswith("gemma")
    factor = SHAPE["hidden_size"] ** 0.5 if gemma else getattr(target.config, "embedding_multiplier", 1.0)
    drafter = make_drafter(target, frozen, DRAFTERS["dflash"].Config(**BLOCK))
    cfg = ExportConfig(dtype="float32", verifier=target.path)
    theirs = judge(export_drafter(drafter, frozen, target, cfg, tmp_path / "export", drafter.depth))
    plain = frozen.embed
    monkeypatch.setattr(frozen, "embed", lambda tokens: factor * plain(tokens))
    with torch.no_grad():
        ((ours, expected),) = both_logits(drafter, frozen, theirs, monkeypatch)
    off = (ours - expected).abs().max() / expected.abs().max()
    assert off > 0.1 or (factor == 1.0 and target.config.model_type == "cohere2")


def test_an_mtp_head_of_these_families_is_said_to_have_no_reader(target, frozen, tmp_path, caplog):
    """`speculators` has MTP layers of Qwen's families alone; an export of another one warns, and is refused there by name."""
    if getattr(target.config, "hidden_size_per_layer_input", 0):
        return  # refused when it is built
    drafter = make_drafter(target, frozen, MTPConfig(steps=2))
    cfg = ExportConfig(dtype="float32", verifier=target.path)
    with caplog.at_level("WARNING"):
        out = export_drafter(drafter, frozen, target, cfg, tmp_path / "export", drafter.depth)
    assert f"no engine reads an MTP head of a {target.config.model_type} target" in caplog.text
    with pytest.raises(ValueError, match=f"Unsupported MTP model type '{target.config.model_type}'"):
        judge(out)


def test_an_mtp_head_of_a_hybrid_target(tmp_path, caplog):
    linear = {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    kinds = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    target = save(Qwen3_5TextConfig(**SHAPE, **linear, layer_types=kinds), tmp_path / "target")
    frozen = FrozenTarget.load(target, torch.float32)
    drafter = make_drafter(target, frozen, MTPConfig(steps=STEPS, attention="own_step", warm_start="never"))
    cfg = ExportConfig(dtype="float32", verifier=target.path)
    theirs = judge(export_drafter(drafter, frozen, target, cfg, tmp_path / "export", STEPS))
    assert not caplog.records
    pack = batch()
    with torch.no_grad():
        logits, _, _ = theirs(
            input_ids=pack.input_ids[None, :14],
            hidden_states=frozen.normed(pack.final)[None, :14],
            position_ids=pack.positions[None, :14],
            step_weights=drafter.step_weights,
        )
        rows = [torch.arange(10)] * STEPS
        for ours, expected in zip(drafter.roll_out(pack, frozen, rows), logits, strict=True):
            torch.testing.assert_close(ours @ frozen.head_weight.T, expected[0, :10], atol=1e-4, rtol=1e-4)
