"""One place that spreads a drafter over the ranks. Model files know nothing of it."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from data_pipelines.engines import resolve_dtype

from ..drafters import Drafter
from .config import ParallelConfig


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise sum over the ranks, in place."""
        dist.all_reduce(values)
        return values

    def from_first(self, numbers: list[int]) -> list[int]:
        """What rank 0 has, of as many int64 numbers on every rank."""
        told = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        dist.broadcast(told, src=0)
        return told.tolist()


@contextmanager
def process_group(timeout_seconds: float):
    """torchrun's process group, or a group of one when started by plain python. A rank that waits for another in a
    collective for timeout_seconds ends with an error."""
    cuda, timeout = torch.cuda.is_available(), timedelta(seconds=timeout_seconds)
    if "RANK" not in os.environ:
        store = dist.HashStore()
        dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timeout)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def parallelize(drafter: Drafter, config: ParallelConfig, world: World) -> Drafter:
    """FSDP2: fp32 masters and reduction, compute in compute_dtype.

    Each of the drafter's `shard_units` is gathered by itself, the rest together. A layer that runs K times a step
    (training-time test) is not a unit: it would be gathered K times.
    """
    drafter.to(world.device)
    dtype = resolve_dtype(config.compute_dtype)
    # Inputs come in the compute dtype already; what is wider (cos and sin of RoPE) has to stay so.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh(world.device.type, (world.size,))
    for unit in drafter.shard_units():
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return fully_shard(drafter, mesh=mesh, mp_policy=policy)
