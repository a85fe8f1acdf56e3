"""What the loop, the checkpoints and the result see of a drafter that is spread over the ranks, whatever spreads it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from ..drafters import Drafter
from .world import World

State = dict[str, dict[str, Any]]
Read = Callable[[State], None]  # fills a state's tensors in place, each with what a checkpoint holds under its keys
MOMENTS = ("exp_avg", "exp_avg_sq")


class Strategy(ABC):
    """A drafter and its optimizer. Every rank calls every method equally often: most are collective.

    The state of a checkpoint is canonical: `model` holds the drafter's own keys, `optimizer` for each trainable parameter
    {"step", "exp_avg", "exp_avg_sq"}; weights and moments in fp32, whatever the mode, so that any mode and any number of
    ranks can go on from it.

    drafter: for what needs no weights (targets, divisors, metrics); its forward is this object's call. optimizer: AdamW over
    what this rank holds of the fp32 masters.
    """

    optimizer: torch.optim.Optimizer

    def __init__(self, drafter: Drafter, world: World):
        self.drafter, self.world = drafter, world

    @abstractmethod
    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The drafter's training forward, in the compute dtype."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Gradients of a micro-batch's loss are added up; with the last one of a step they are summed over the ranks."""

    @abstractmethod
    def step(self, rate: float) -> float:
        """Clip by the global norm, take one optimizer step, forget the gradients. Returns the norm before clipping; where
        that is not finite, nothing is applied."""

    @abstractmethod
    def state(self) -> State:
        """The canonical state. Several ranks may hold the same tensor, and a rank need not hold all."""

    @abstractmethod
    def fill(self, read: Read) -> None:
        """Weights and moments from a checkpoint. Every rank calls it."""

    @property
    def steps_in_moments(self) -> int:
        """How many steps the optimizer's moments have seen."""
        return max(int(moments["step"]) for moments in self.optimizer.state.values())

    @abstractmethod
    def full_weights(self) -> dict[str, torch.Tensor]:
        """On rank 0 the drafter's state dict, whole, in fp32 and on the host; empty on the others."""
