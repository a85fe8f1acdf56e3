"""Where the processes of a run live: all on this machine, or spread over the nodes of a Slurm job.

The launcher starts, watches, restarts and stops a role in the same way wherever it is: on another node it is a child as
well, the `srun` that carries it there.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Protocol

from data_pipelines.errors import UserError
from trainer.cluster import ClusterConfig

from .supervision.processes import Role


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name.strip()]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def assign_gpus(gpus: list[str], ranks: int, producers: int) -> tuple[list[str], list[str]]:
    """Which GPUs the ranks have, and which one each producer. Ranks come first; producers share out what is left, or the
    ranks' own when nothing is. Without a GPU both are empty. Raises UserError when there are fewer GPUs than ranks."""
    if not gpus:
        return [], []
    if len(gpus) < ranks:
        raise UserError(
            f"cluster.ranks={ranks}, and this machine shows {len(gpus)} GPU(s)",
            fix=f"cluster.ranks={len(gpus)}; on a single GPU, source=colocated saves a second copy of the target",
        )
    left = gpus[ranks:] or gpus
    return gpus[:ranks], [left[i % len(left)] for i in range(producers)]


@dataclass(frozen=True)
class Location:
    """Where one process runs. prefix: the words before its command that take it there; none on this machine. python: the
    interpreter there. gpus: by the names that CUDA_VISIBLE_DEVICES takes. host: the address of that machine, for its
    metrics. environment: what a process needs to know of the place."""

    host: str
    gpus: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    python: str = sys.executable
    environment: dict[str, str] = field(default_factory=dict)

    def role(self, name: str, command: list[str], environment: dict[str, str]) -> Role:
        """command: what comes after the interpreter."""
        environment = {**environment, **self.environment}
        if self.gpus:
            environment = {**environment, "CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}
        if not self.prefix:
            return Role(name, [self.python, *command], environment)
        # Slurm sets CUDA_VISIBLE_DEVICES in each step anew, hence inside of it.
        variables = [f"{key}={value}" for key, value in environment.items()]
        return Role(name, [*self.prefix, "env", *variables, self.python, *command], elsewhere=True)


class Placement(Protocol):
    """host: the address of this machine, at which the run's servers are reached. nodes: how many have trainer ranks."""

    host: str
    nodes: int

    def check(self) -> None:
        """Raises UserError when there is not room for all."""

    def producer(self, i: int) -> Location: ...

    def capture(self, i: int) -> Location: ...

    def trainer(self) -> Location: ...


@dataclass
class LocalPlacement:
    """Everything on this machine."""

    cluster: ClusterConfig
    host: str
    nodes: int = 1
    gpus: list[str] = field(default_factory=visible_gpus)

    def check(self) -> None:
        assign_gpus(self.gpus, self.cluster.ranks, self.cluster.producers)

    def producer(self, i: int) -> Location:
        _, devices = assign_gpus(self.gpus, self.cluster.ranks, self.cluster.producers)
        return Location(self.host, tuple(devices[i : i + 1]))

    def capture(self, i: int) -> Location:
        """Nobody else runs yet: all GPUs are there to be shared out."""
        return Location(self.host, (self.gpus[i % len(self.gpus)],) if self.gpus else ())

    def trainer(self) -> Location:
        devices, _ = assign_gpus(self.gpus, self.cluster.ranks, self.cluster.producers)
        return Location(self.host, tuple(devices))
