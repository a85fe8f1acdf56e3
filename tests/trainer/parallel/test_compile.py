"""Compiled layers compute what they compute without, whatever the packs look like, and are compiled a few times only."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch

from data_pipelines.features import Features
from data_pipelines.packing import Document, Pack
from trainer.batch import Batch
from trainer.parallel import ParallelConfig, World

from .ranks import on_ranks
from .runs import SIZE, TAPS, TARGET, spread


def batch(tokens: int) -> Batch:
    """One document: the fewer its tokens, the fewer the anchors of a block drafter."""
    ids = np.random.default_rng(tokens).integers(0, TARGET.vocab_size, tokens).astype(np.int32)
    generator = torch.Generator().manual_seed(tokens)
    features = [torch.randn(tokens, *shape, generator=generator) for shape in ((TAPS, SIZE), (SIZE,))]
    pack = Pack((Document(ids, np.ones(tokens, bool)),))
    return Batch.of(pack, Features(*features), dtype=torch.float32, device="cpu", address=(0, tokens))


def gradients(world: World, name: str, **options) -> list[np.ndarray]:
    strategy, frozen = spread(world, name, ParallelConfig("ddp", compute_dtype="float32", **options))
    lengths = range(6, 18)
    for tokens in lengths:
        targets = strategy.drafter.targets(batch(tokens), frozen)
        loss, _ = strategy(batch(tokens), targets, frozen, torch.ones(strategy.drafter.depth))
        strategy.backward(loss, last=tokens == lengths[-1])
    return [p.grad.full_tensor().numpy() for p in strategy.drafter.parameters() if p.requires_grad]


def both(world: World, name: str, recompute: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    plain = gradients(world, name, recompute=recompute)
    # Traced by dynamo and run as traced: it is what is captured that is tested, not the code that inductor makes of it.
    strict = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
    with strict, patch.object(torch, "compile", partial(torch.compile, backend="eager")):
        traced = gradients(world, name, recompute=recompute, compile=True)
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    return list(zip(traced, plain, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["eagle3", "dflash", "mtp"])
def test_compiled_layers_train_the_same(name, recompute):
    for traced, plain in on_ranks(1, both, name, recompute)[0]:
        np.testing.assert_allclose(traced, plain, rtol=1e-4, atol=1e-6)
