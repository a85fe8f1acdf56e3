"""FSDP2 over a mesh of one or two dimensions: parallel=fsdp2, hsdp and ddp.

A two-dimensional mesh shards over its second dimension and keeps replicas over its first (HSDP, PyTorch FSDP, arXiv
2304.11277, §3.2.2). Where the second is 1 wide, that is data parallelism with whole weights on every rank: the same code,
the same mixed precision, one all-reduce of the gradients.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from data_pipelines.engines import resolve_dtype

from ..drafters import Drafter
from ..optim import OptimConfig, build_optimizer, clip_gradients
from .config import ParallelConfig
from .strategy import Read, State, Strategy
from .world import World


class Sharded(Strategy):
    """Each of the drafter's `shard_units` is gathered by itself, the rest together. A layer that runs K times a step
    (training-time test) is not a unit: it would be gathered K times."""

    def __init__(self, drafter: Drafter, config: ParallelConfig, optim: OptimConfig, world: World):
        super().__init__(drafter, world)
        options: dict[str, Any] = {
            "mesh": _mesh(config, world),
            # Inputs come in the compute dtype already; what is wider (cos and sin of RoPE) has to stay so.
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=resolve_dtype(config.compute_dtype), reduce_dtype=torch.float32, cast_forward_inputs=False
            ),
        }
        if config.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type != "cpu")
        for unit in drafter.shard_units():
            fully_shard(unit, **options)
        fully_shard(drafter, **options)
        self.optimizer = build_optimizer(optim, drafter.parameters())
        self._max_norm = optim.max_grad_norm

    def __call__(self, *inputs):
        return self.drafter(*inputs)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self.drafter.set_requires_gradient_sync(last)
        (loss * self.world.size).backward()  # FSDP averages over the ranks; the loss is one sum over all of them

    def step(self, rate: float) -> float:
        norm = clip_gradients(self.drafter.parameters(), self._max_norm)
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def state(self) -> State:
        """The live tensors."""
        moments = {n: self.optimizer.state[p] for n, p in self.drafter.named_parameters() if p.requires_grad}
        return {"model": self.drafter.state_dict(), "optimizer": moments}

    def fill(self, read: Read) -> None:
        read(self.state())

    def full_weights(self) -> dict[str, torch.Tensor]:
        whole = {}
        for name, tensor in self.drafter.state_dict().items():
            gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.world.rank == 0:
                whole[name] = gathered.cpu()
        return whole


def _mesh(config: ParallelConfig, world: World) -> DeviceMesh:
    if config.name == "fsdp2":
        return init_device_mesh(world.device.type, (world.size,))
    replicas = world.size if config.name == "ddp" else config.replicas or world.machines
    shape = (replicas, world.size // replicas)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("replicas", "shards"))
