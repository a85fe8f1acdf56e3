"""How the drafter is spread over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from data_pipelines.errors import UserError


@dataclass
class ParallelConfig:
    """fsdp2: `fully_shard` per layer, fp32 masters and reduction, compute in compute_dtype.

    timeout_seconds: for which a rank waits for the others in a collective before it ends with an error. A rank that waits
    for data keeps the others waiting, hence more than source.patience_seconds.
    """

    name: str = "fsdp2"
    compute_dtype: str = "auto"  # auto: bfloat16 where the machine computes it natively, else float32
    timeout_seconds: float = 900.0

    def __post_init__(self) -> None:
        if self.name != "fsdp2":
            raise UserError(f"parallel.name={self.name} is not one of fsdp2")
        if self.timeout_seconds <= 0:
            raise UserError(f"parallel.timeout_seconds={self.timeout_seconds:g}; it must be more than 0")
        if self.compute_dtype not in ("auto", "bfloat16", "float32"):
            raise UserError(f"parallel.compute_dtype={self.compute_dtype} is not one of auto, bfloat16, float32")
