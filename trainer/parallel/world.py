"""The ranks of a run, and what they tell each other."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """machines: on which the ranks are, as many on each."""

    rank: int
    size: int
    device: torch.device
    machines: int = 1

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise sum over the ranks, in place."""
        dist.all_reduce(values)
        return values

    def from_first(self, numbers: list[int]) -> list[int]:
        """What rank 0 has, of as many int64 numbers on every rank."""
        told = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        dist.broadcast(told, src=0)
        return told.tolist()


def limit_waits(seconds: float) -> None:
    """For every group that there is: mesh dimensions, DeepSpeed's and a checkpoint's are made with torch's default, 30
    minutes, whatever the default group was given."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


@contextmanager
def process_group(timeout_seconds: float):
    """torchrun's process group, or a group of one when started by plain python. A rank that waits for another in a
    collective for timeout_seconds ends with an error."""
    cuda, timeout = torch.cuda.is_available(), timedelta(seconds=timeout_seconds)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"  # what is offloaded to the host is reduced there
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    try:
        size = dist.get_world_size()
        yield World(dist.get_rank(), size, device, size // int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    finally:
        dist.destroy_process_group()
