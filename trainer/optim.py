"""AdamW, linear warm-up, cosine decay, clipping by the global norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from data_pipelines.errors import UserError


@dataclass
class OptimConfig:
    lr: float = 1e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_fraction: float = 0.04  # of all steps
    final_lr_fraction: float = 0.1  # of lr, reached at the last step
    max_grad_norm: float = 0.5

    def __post_init__(self) -> None:
        if self.max_grad_norm <= 0:
            raise UserError(f"optim.max_grad_norm={self.max_grad_norm:g}; a large one, such as 1e9, clips nothing")


def build_optimizer(
    config: OptimConfig, parameters: Iterable[torch.nn.Parameter], *, moments: bool = True
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, its moments already made unless told otherwise."""
    optimizer = torch.optim.AdamW(
        [p for p in parameters if p.requires_grad],
        lr=config.lr,
        betas=tuple(config.betas),
        eps=config.eps,
        weight_decay=config.weight_decay,
        foreach=True,
    )
    if moments:
        make_moments(optimizer, [p for group in optimizer.param_groups for p in group["params"]])
    return optimizer


def make_moments(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """As they are before the first step: a checkpoint can only fill state that exists."""
    for p in parameters:
        optimizer.state[p] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """The rate of step `step` in [0, total_steps): a function of the step alone, so that a resumed run needs no state."""
    warmup = max(1, round(config.warmup_fraction * total_steps))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - 1 - warmup)
    floor = config.final_lr_fraction
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> float:
    """Scales all gradients by one factor so that their **global** norm is at most max_norm; returns the norm before."""
    gradients = [p for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in gradients])
    if isinstance(norm, DTensor):  # the norm over all shards, not over this rank's
        norm = norm.full_tensor()
    torch.nn.utils.clip_grads_with_norm_(gradients, max_norm, norm)
    return norm.item()
