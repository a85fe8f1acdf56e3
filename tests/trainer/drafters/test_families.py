"""Drafters of a shape of their own (EAGLE-3, DFlash, DSpark) on targets of every family: features → training steps →
export → lossless decoding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from data_pipelines.engines import build_engine
from data_pipelines.features import FeatureSpec
from data_pipelines.packing import Document, Pack
from tests.trainer.families import FAMILIES, build_target
from trainer.batch import Batch
from trainer.decoding.chain import decode_chain, decode_plain
from trainer.drafters import build_drafter
from trainer.drafters.dflash import DFlashConfig
from trainer.drafters.dspark import DSparkConfig
from trainer.drafters.eagle3 import Eagle3Config
from trainer.export.config import ExportConfig
from trainer.export.speculators import export_drafter, load_export
from trainer.target import FrozenTarget

DRAFTS, NEW = 3, 12
BLOCKS = {"num_layers": 2, "mask_token": 90}
DRAFTERS = {
    "eagle3": Eagle3Config(steps=DRAFTS, loss="kl"),
    "dflash": DFlashConfig(**BLOCKS, block_size=DRAFTS + 1, loss="ce + kl"),
    "dspark": DSparkConfig(**BLOCKS, block_size=DRAFTS, markov_rank=8),
}


@pytest.fixture(scope="module", params=FAMILIES)
def target(request, tmp_path_factory):
    return build_target(FAMILIES[request.param](), tmp_path_factory.mktemp(request.param))


def features(target, taps):
    rng = np.random.default_rng(0)
    documents = tuple(
        Document(rng.integers(0, target.config.vocab_size, n).astype(np.int32), np.arange(n) > 1) for n in (11, 1, 8)
    )
    pack = Pack(documents)
    spec = FeatureSpec("tests", taps, target.config.hidden_size, "float32")
    computed = build_engine(target, spec).compute(pack.input_ids, pack.lengths)
    return Batch.of(pack, computed, dtype=torch.float32, device="cpu", address=(0,))


@pytest.mark.parametrize("name", DRAFTERS)
def test_features_training_export_decoding(target, tmp_path, name):
    frozen = FrozenTarget.load(target, torch.float32)
    torch.manual_seed(3)
    drafter = build_drafter(DRAFTERS[name], target.config, None)
    rope = target.config.rope_parameters  # Gemma 3 has one per kind of layer
    theta = rope.get("full_attention", rope)["rope_theta"]
    assert drafter.layer_config.rope_parameters["rope_theta"] == theta
    batch = features(target, drafter.taps)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    losses = []
    for _ in range(6):
        targets = drafter.targets(batch, frozen)
        weights = torch.tensor(drafter.step_weights) / drafter.divisors(targets.denominators).float()
        loss, _ = drafter(batch, targets, frozen, weights)
        loss.backward()
        for parameter, p in drafter.named_parameters():
            assert p.grad is not None and torch.isfinite(p.grad).all() and p.grad.any(), parameter
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.97 * losses[0]

    out = export_drafter(drafter, frozen, target, ExportConfig(dtype="float32"), tmp_path / "export", DRAFTS)
    again = load_export(out, target.config)
    assert all(torch.equal(again.state_dict()[key], tensor) for key, tensor in drafter.state_dict().items())

    model = target.load_model(torch.float32)
    prompts = [[5, 17, 3, 80, 2], [9], list(range(20, 33))]
    drafter.eval()
    plain = decode_plain(model, prompts, max_new_tokens=NEW)
    decoded = decode_chain(model, prompts, drafter, frozen, draft_tokens=DRAFTS, max_new_tokens=NEW)
    assert [d.tokens for d in decoded] == [d.tokens for d in plain]
    assert decode_chain(model, prompts, again, frozen, draft_tokens=DRAFTS, max_new_tokens=NEW) == decoded
