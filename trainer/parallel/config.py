"""How the drafter is spread over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from data_pipelines.errors import UserError, check_choice

MODES = ("fsdp2", "hsdp", "ddp", "deepspeed")
COMPUTE_DTYPES = ("auto", "bfloat16", "float32")


@dataclass
class ParallelConfig:
    """name: fsdp2 shards weights, gradients and moments over all ranks; hsdp shards them over the ranks of a replica;
    ddp keeps all of them on every rank; deepspeed is ZeRO. Masters, moments and the reduction of gradients are fp32 in
    each, and none of it but compute_dtype decides what is learned: a run may be resumed in another mode and size.

    timeout_seconds: for which a rank waits for the others in a collective before it ends with an error. A rank that waits
    for data keeps the others waiting, hence more than source.patience_seconds. replicas: of hsdp; 0: one per machine.
    context: ranks that share one pack. cpu_offload: masters and moments (and with fsdp2, hsdp and ddp the gradients) live in
    the host's memory. recompute: activations are made again in the backward rather than kept. compile: torch.compile of
    each layer that runs by itself. zero_stage: of deepspeed: 1 shards moments and masters, 2 gradients too, 3 weights too.
    """

    name: str = "fsdp2"
    compute_dtype: str = "auto"  # auto: bfloat16 where the machine computes it natively, else float32
    timeout_seconds: float = 900.0
    replicas: int = 0
    context: int = 1
    cpu_offload: bool = False
    recompute: bool = False
    compile: bool = False
    zero_stage: int = 1

    def __post_init__(self) -> None:
        for key, options in (("name", MODES), ("compute_dtype", COMPUTE_DTYPES)):
            check_choice(f"parallel.{key}", getattr(self, key), options)
        if self.timeout_seconds <= 0:
            raise UserError(f"parallel.timeout_seconds={self.timeout_seconds:g}; it must be more than 0")
        if self.context < 1:
            raise UserError(f"parallel.context={self.context}; 1 gives every rank packs of its own")
        if self.replicas < 0:
            raise UserError(f"parallel.replicas={self.replicas}; 0 makes one replica per machine")
        if self.replicas and self.name != "hsdp":
            raise UserError(
                f"parallel.replicas={self.replicas} belongs to parallel=hsdp, not to {self.name}",
                fix="use parallel=hsdp, or leave it out",
            )
        if self.zero_stage != 1 and self.name != "deepspeed":
            raise UserError(
                f"parallel.zero_stage={self.zero_stage} belongs to parallel=deepspeed, not to {self.name}",
                fix="use parallel=deepspeed, or leave it out",
            )
        if self.zero_stage not in (1, 2, 3):
            raise UserError(
                f"parallel.zero_stage={self.zero_stage} is not one of 1, 2, 3",
                fix="parallel=ddp is what stage 0 would be" if self.zero_stage == 0 else None,
            )

    def check_size(self, size: int, machines: int = 1) -> None:
        """Raises UserError unless `size` ranks on so many machines can be spread like this."""
        replicas = self.replicas or machines
        if self.name == "hsdp" and size % replicas:
            raise UserError(
                f"{size} ranks cannot be shared out evenly over {replicas} replicas of parallel=hsdp",
                fix="choose parallel.replicas so that it divides the ranks, or parallel=fsdp2",
            )
        if size % self.context:
            raise UserError(
                f"{size} ranks cannot share packs by {self.context} (parallel.context)",
                fix="choose a parallel.context that divides the ranks",
            )
