"""One place that spreads a drafter over the ranks. Model files know nothing of it."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from data_pipelines.engines import resolve_dtype

from ..drafters import Drafter
from .config import ParallelConfig
from .world import World, process_group

__all__ = ["World", "parallelize", "process_group"]


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
