"""A run of the real loop, optimizer and checkpoints on random packs, in any mode: small enough for four ranks in seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from data_pipelines.engines import resolve_dtype
from data_pipelines.features import Features
from data_pipelines.packing import Document, Pack
from trainer.checkpoint import CheckpointConfig, Checkpointer, load_checkpoint
from trainer.drafters import build_drafter
from trainer.drafters.dflash import DFlashConfig
from trainer.drafters.eagle3 import Eagle3Config
from trainer.drafters.mtp import MTPConfig
from trainer.loop import Trainer
from trainer.optim import OptimConfig
from trainer.parallel import ParallelConfig, Strategy, World, parallelize
from trainer.parallel.context import ContextGroup
from trainer.parallel.strategy import MOMENTS
from trainer.reporting import Progress
from trainer.target import FrozenTarget

SIZE, TAPS = 32, 3
TARGET = LlamaConfig(
    vocab_size=97, hidden_size=SIZE, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=128, tie_word_embeddings=False,
)  # fmt: skip
DRAFTERS = {
    # A trained head: of the size of the vocabulary, and read outside of any module's forward.
    "eagle3": Eagle3Config(steps=3, num_layers=2, train_head=True),
    "dflash": DFlashConfig(num_layers=2, block_size=4, anchors=16, mask_token=3),
    "mtp": MTPConfig(steps=3),
}
PACKS = 8  # in one optimizer step: two at least for each of four ranks
TOTAL = 3  # steps of a run


@dataclass
class Run:
    """What a rank knows of a run: rows of the log, and (rank 0) the weights, and the moments that it holds."""

    rows: list[dict]
    weights: dict[str, np.ndarray]
    moments: dict[str, np.ndarray]


def optim(**options) -> OptimConfig:
    """Clips every step by its default: the norm of these gradients is about 1."""
    return OptimConfig(**{"lr": 3e-3, "weight_decay": 0.1, "max_grad_norm": 0.05, **options})


def frozen_target(dtype: torch.dtype) -> FrozenTarget:
    torch.manual_seed(1)
    model = LlamaForCausalLM(TARGET).requires_grad_(False)
    model.lm_head.weight.normal_(std=0.4)
    return FrozenTarget(model.to(dtype))


def new_drafter(name: str, frozen: FrozenTarget):
    torch.manual_seed(2)
    drafter = build_drafter(DRAFTERS[name], TARGET, None)
    with torch.no_grad():  # norms of 1 would hide mistakes; and weights that bfloat16 rounds
        for p in drafter.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return drafter


class Packs:
    """Random packs by their index, as a prefetcher hands them out."""

    wait_seconds = 0.0

    def __init__(self, rank: int, size: int, start: int, stop: int = TOTAL, ask_to_stop: Callable = lambda: None):
        """ask_to_stop: called with the packs of the last step before `stop`."""
        self._index, self._size = start * PACKS + rank, size
        self._last, self._ask_to_stop = (stop - 1) * PACKS, ask_to_stop

    def next(self, _):
        index, self._index = self._index, self._index + self._size
        if index >= self._last:
            self._ask_to_stop()
        rng = np.random.default_rng(index)
        lengths = [11, 7 + index % 5]
        documents = tuple(
            Document(rng.integers(0, TARGET.vocab_size, n).astype(np.int32), rng.random(n) < 0.9) for n in lengths
        )
        generator = torch.Generator().manual_seed(index)
        taps = torch.randn(sum(lengths), TAPS, SIZE, generator=generator)
        return index, Pack(documents), Features(taps, torch.randn(sum(lengths), SIZE, generator=generator))


def spread(world: World, drafter: str, config: ParallelConfig, **options) -> tuple[Strategy, FrozenTarget]:
    frozen = frozen_target(resolve_dtype(config.compute_dtype))
    return parallelize(new_drafter(drafter, frozen), config, optim(**options), world), frozen


def _trainer(world: World, strategy: Strategy, frozen: FrozenTarget, start: int, checkpointer=None, tracker=None):
    config = SimpleNamespace(global_batch=PACKS, seed=0, optim=optim())
    setup = SimpleNamespace(config=config, total_steps=TOTAL, spec=None)
    context = ContextGroup.of(world, ParallelConfig())
    return Trainer(setup, world, context, strategy, frozen, checkpointer, tracker, Progress(start, TOTAL), "")


def steps(world: World, strategy: Strategy, frozen: FrozenTarget, start: int, stop: int, folder: Path) -> list[dict]:
    """Steps start … stop-1 by the real loop, which leaves a checkpoint of `stop` in the folder. Returns the log's rows."""
    rows: list[dict] = []
    checkpointer = Checkpointer(folder, CheckpointConfig(every=0), {"run": "test"})
    trainer = _trainer(world, strategy, frozen, start, checkpointer, SimpleNamespace(log=rows.append))
    packs = Packs(world.rank, world.size, start, stop, trainer.request_stop)
    trainer.run(packs, start)
    checkpointer.close()
    dist.barrier()  # published by rank 0, before anybody reads it
    return rows


def train(
    world: World, config: ParallelConfig, folder: Path, start: int, stop: int, drafter: str = "eagle3", **options
) -> Run:
    """From the checkpoint of `start` in the folder (0: anew) to `stop`, and what is in memory then."""
    strategy, frozen = spread(world, drafter, config, **options)
    if start:
        assert load_checkpoint(folder / f"step_{start:08d}", strategy) == start
    rows = steps(world, strategy, frozen, start, stop, folder)
    return Run(rows, *whole(strategy))


def whole(strategy: Strategy) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Weights (on rank 0) and moments by their canonical names, put together from all ranks."""
    weights = {name: tensor.numpy().copy() for name, tensor in strategy.full_weights().items()}
    moments = {}
    for name, state in sorted(strategy.state()["optimizer"].items()):
        for key in MOMENTS:
            tensor = state.get(key)  # another rank's, perhaps
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            moments |= {} if tensor is None else {f"{name}.{key}": tensor.numpy().copy()}
    everyones: list[dict] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, moments)
    return weights, {name: moment for one in everyones for name, moment in one.items()}


def loss_weights(world: World, strategy: Strategy, frozen: FrozenTarget):
    """This rank's batches of step 0, their targets, and what a draft of each step weighs: as the loop makes them."""
    trainer = _trainer(world, strategy, frozen, 0)
    batches, _ = trainer._take(Packs(world.rank, world.size, 0))
    targets = [strategy.drafter.targets(batch, frozen) for batch in batches]
    return batches, targets, trainer._weights(targets)[0]


def held(strategy: Strategy) -> int:
    """Bytes of fp32 masters and moments that this rank holds."""
    total = 0
    for master, moments in strategy.optimizer.state.items():
        for tensor in (master, *(moments[key] for key in MOMENTS)):
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            total += own.numel() * own.element_size()
    return total
