"""Random documents with random features: what a drafter's own tests need, in float64, without a target in the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data_pipelines.features import Features
from data_pipelines.packing import Document, Pack
from trainer.batch import Batch
from trainer.drafters import build_drafter
from trainer.drafters.eagle3 import Eagle3Config
from trainer.target import FrozenTarget

from .running import train


@pytest.fixture(scope="session")
def target_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )


@pytest.fixture(scope="session")
def frozen(target_config) -> FrozenTarget:
    torch.manual_seed(1)
    model = LlamaForCausalLM(target_config).double().requires_grad_(False)
    model.lm_head.weight.normal_(std=0.4)
    return FrozenTarget(model)


@pytest.fixture
def world(target_config, frozen):
    """make(lengths, …) → a pack with random tokens, mask and features; drafter(**options) → a float64 drafter."""

    def make(lengths, *, seed=0, mask="random"):
        rng = np.random.default_rng(seed)
        documents = []
        for n in lengths:
            supervised = {
                "random": rng.random(n) < 0.8,
                "all": np.ones(n, dtype=bool),
                "none": np.zeros(n, dtype=bool),
                "answer": np.arange(n) >= n // 3,
            }[mask]
            documents.append(Document(rng.integers(0, target_config.vocab_size, n).astype(np.int32), supervised))
        pack = Pack(tuple(documents))
        generator = torch.Generator().manual_seed(seed)
        size = target_config.hidden_size
        taps = torch.randn(len(pack), 3, size, generator=generator, dtype=torch.double)
        final = torch.randn(len(pack), size, generator=generator, dtype=torch.double)
        features = Features(taps, final)
        return SimpleNamespace(
            pack=pack,
            features=features,
            batch=Batch.of(pack, features, dtype=torch.double, device="cpu", address=(seed,)),
        )

    def drafter(kept=None, **options):
        torch.manual_seed(2)
        built = build_drafter(Eagle3Config(**options), target_config, kept).double()
        with torch.no_grad():  # norms of 1 and tiny weights would hide mistakes
            for name, p in built.named_parameters():
                p.add_(torch.randn_like(p) * (0.2 if "norm" in name else 0.15))
        built.start_head(frozen)
        return built

    return SimpleNamespace(make=make, drafter=drafter, frozen=frozen)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> Path:
    """The folder of a whole run of one rank."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    train(run_dir)
    return run_dir


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory) -> Path:
    """The same run with two ranks."""
    run_dir = tmp_path_factory.mktemp("two_ranks")
    train(run_dir, ranks=2)
    return run_dir


def slice_batch(batch: Batch, start: int, stop: int) -> Batch:
    """The rows [start, stop) of a batch, as a batch of their own."""
    return replace(batch, **{name: rows[start:stop] for name, rows in row_tensors(batch).items()})


def row_tensors(batch: Batch) -> dict[str, torch.Tensor]:
    """What a batch holds for each of its rows."""
    return {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
