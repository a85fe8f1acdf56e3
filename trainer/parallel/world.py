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
