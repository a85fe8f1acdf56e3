"""Where the processes of a run live: all on this machine, or spread over the nodes of a Slurm job.

The launcher starts, watches, restarts and stops a role in the same way wherever it is: on another node it is a child as
well, the `srun` that carries it there.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Protocol

from trainer.cluster import ClusterConfig

from .gpus import assign_gpus, visible_gpus
from .processes import Role


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
