"""Reference runs: a few layers of a target and a training step of every drafter, of published shapes with random weights.
From their operations, counted, and their time follows what share of its peak a device reaches, and what a layer costs that
has next to nothing to compute."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data_pipelines.engines.anatomy import anatomy
from data_pipelines.features import Features
from data_pipelines.packing import Document, Pack
from trainer.batch import Batch
from trainer.drafters import DRAFTERS, Drafter, build_drafter
from trainer.optim import OptimConfig
from trainer.parallel import ParallelConfig, parallelize, process_group
from trainer.target import FrozenTarget

from .flops import target_flops, training_flops
from .probes import best
from .shapes import TargetShape, count_target
from .work import measured_work

LAYERS = 4  # of the target: all are alike


@dataclass(frozen=True)
class Scale:
    """Of a reference run: shapes, documents of one pack, draft vocabulary, and the drafters' options."""

    shape: dict[str, int]
    documents: tuple[int, ...]
    draft_vocabulary: int
    anchors: int

    def config(self) -> LlamaConfig:
        return LlamaConfig(num_hidden_layers=LAYERS, max_position_embeddings=8192, **self.shape)


# SmolLM2-135M as in the demo; Llama-3.1-8B on a GPU; and layers that compute nearly nothing.
SMALL = Scale(
    {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3},
    (140, 130, 120, 110), 2048, 96,
)  # fmt: skip
LARGE = Scale(
    {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
     "num_key_value_heads": 8},
    (1500, 1000, 900, 600), 32000, 512,
)  # fmt: skip
EMPTY = Scale(
    {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2},
    (70, 60, 60, 50), 0, 64,
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """flops and the seconds that they took; layers: how many were run."""

    matmul: float
    attention: float
    seconds: float
    layers: int


def run_target(scale: Scale, dtype: torch.dtype, device: torch.device) -> Measured:
    """The decoder's forward over one pack, masked as the engine does."""
    config = scale.config()
    model = LlamaForCausalLM(config).to(device, dtype).eval().requires_grad_(False)
    tokens = sum(scale.documents)
    ids = torch.randint(config.vocab_size, (1, tokens), device=device)
    positions = torch.cat([torch.arange(n) for n in scale.documents])[None].to(device)
    decoder = anatomy(model).decoder
    with torch.no_grad():
        seconds = best(lambda: decoder(input_ids=ids, position_ids=positions, use_cache=False), device)
    flops = target_flops(_count(config), tokens, tokens)
    return Measured(flops.matmul, flops.attention, seconds, LAYERS)


def run_drafters(scale: Scale, dtype: torch.dtype, device: torch.device, only: str = "") -> dict[str, Measured]:
    """Forward and backward of one pack, by drafter. only: this one."""
    config = scale.config()
    frozen = FrozenTarget(LlamaForCausalLM(config).to(device, dtype).eval().requires_grad_(False))
    kept = torch.arange(scale.draft_vocabulary, device=device) if scale.draft_vocabulary else None
    found = {}
    for name, kind in {only: DRAFTERS[only]}.items() if only else DRAFTERS.items():
        drafter, batch = _drafter(kind, scale, config, kept, dtype, device)
        targets = drafter.targets(batch, frozen)
        weights = torch.ones(drafter.depth, device=device)

        def step(drafter=drafter, batch=batch, targets=targets, weights=weights) -> None:
            drafter.targets(batch, frozen)
            drafter(batch, targets, frozen, weights)[0].backward()

        flops = training_flops(drafter, measured_work(drafter, batch), _count(config))
        found[name] = Measured(flops.matmul, flops.attention, best(step, device), drafter.layers_run())
    return found


def run_step(dtype: torch.dtype) -> float:
    """Seconds of an optimizer step beside forward and backward (sharding's hooks, clipping, moments), of a tiny drafter."""
    with process_group(60.0) as world:
        config, device = EMPTY.config(), world.device
        frozen = FrozenTarget(LlamaForCausalLM(config).to(device, dtype).eval().requires_grad_(False))
        drafter, batch = _drafter(DRAFTERS["eagle3"], EMPTY, config, None, torch.float32, device)
        batch = replace(batch, taps=batch.taps.to(dtype), final=batch.final.to(dtype))
        targets, weights = drafter.targets(batch, frozen), torch.ones(drafter.depth, device=device)
        compute = ParallelConfig(compute_dtype=str(dtype).removeprefix("torch."))
        strategy = parallelize(drafter, compute, OptimConfig(), world)

        def whole() -> None:
            drafter.targets(batch, frozen)
            strategy.backward(strategy(batch, targets, frozen, weights)[0], last=True)
            strategy.step(1e-4)

        with_step = best(whole, device)
    return max(0.0, with_step - run_drafters(EMPTY, dtype, device, only="eagle3")["eagle3"].seconds)


def _drafter(kind, scale: Scale, config, kept, dtype, device) -> tuple[Drafter, Batch]:
    drafter = build_drafter(kind.reference_config(scale.anchors), config, kept)
    drafter = drafter.to(device, dtype)
    rng = np.random.default_rng(0)
    pack = Pack(
        tuple(
            Document(rng.integers(0, config.vocab_size, n).astype(np.int32), np.arange(n) >= n // 2)
            for n in scale.documents
        )
    )
    states = Features(
        torch.randn(len(pack), len(getattr(drafter, "taps", ())), config.hidden_size, dtype=dtype),
        torch.randn(len(pack), config.hidden_size, dtype=dtype),
    )
    return drafter, Batch.of(pack, states, dtype=dtype, device=device, address=(0,))


def _count(config: LlamaConfig) -> TargetShape:
    return count_target("reference", config, None, "")
