"""One place that spreads a drafter over the ranks. Model files know nothing of it."""

from __future__ import annotations

import torch

from ..drafters import Drafter
from ..optim import OptimConfig
from .config import ParallelConfig
from .sharded import Sharded
from .strategy import Strategy
from .world import World, limit_waits, process_group

__all__ = ["ParallelConfig", "Strategy", "World", "limit_waits", "parallelize", "process_group"]


def parallelize(drafter: Drafter, config: ParallelConfig, optim: OptimConfig, world: World) -> Strategy:
    """drafter: in fp32, with the same weights on every rank.

    Activations to be made again, then compilation, and only then sharding. The compiler has to see what is made again, to
    plan what it keeps; and weights are gathered and released around a layer's call, which must not be inside of what is
    traced. Compiled is a layer's `forward`, not the layer: names of parameters stay what they are.

    Raises UserError on a number of ranks that cannot be spread like this, and when DeepSpeed is wanted and not there.
    """
    config.check_size(world.size, world.machines)
    drafter.to(world.device)
    drafter.recompute = config.recompute
    if config.compile:
        for unit in drafter.shard_units() or _pure_parts(drafter):
            unit.forward = torch.compile(unit.forward)
    if config.name == "deepspeed":
        from .zero import Zero  # an optional dependency

        return Zero(drafter, config, optim, world)
    return Sharded(drafter, config, optim, world)


def _pure_parts(drafter: Drafter) -> list[torch.nn.Module]:
    """Of layers that run K times a step: they hand their rows to an object that remembers them, their MLPs do not."""
    return [module for name, module in drafter.named_modules() if name.rpartition(".")[2] == "mlp"]
