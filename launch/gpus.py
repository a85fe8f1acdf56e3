"""Which role gets which GPU of this machine."""

from __future__ import annotations

import os

from data_pipelines.errors import UserError


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
