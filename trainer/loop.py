"""The loop: next packs → denominators → forward and backward → clip, step, log → maybe a checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch

from data_pipelines.errors import UserError
from data_pipelines.features import Features
from data_pipelines.packing import Pack

from .batch import Batch
from .checkpoint import Checkpointer
from .drafters import Drafter
from .metrics import summarise
from .optim import clip_gradients, learning_rate
from .parallel import World
from .setup import RunSetup
from .target import FrozenTarget
from .tracking import Tracker

PREEMPTED = 75  # exit status of a run that was told to stop and has written a checkpoint


class Trainer:
    """One rank. `stop_requested` may be set at any time (by a signal); the ranks agree on it at their next step."""

    def __init__(
        self,
        setup: RunSetup,
        world: World,
        drafter: Drafter,
        optimizer: torch.optim.Optimizer,
        frozen: FrozenTarget,
        checkpointer: Checkpointer,
        tracker: Tracker | None,
    ):
        self.setup, self.world, self.drafter, self.optimizer = setup, world, drafter, optimizer
        self.frozen, self.checkpointer, self.tracker = frozen, checkpointer, tracker
        self.packs_per_rank = setup.config.global_batch // world.size
        self.stop_requested = False

    def run(self, packs: Iterator[tuple[int, Pack, Features]], start: int) -> bool:
        """Steps start … total_steps-1. False when it was asked to stop, and has written a checkpoint instead."""
        total = self.setup.total_steps
        for step in range(start, total):
            began, waited = time.monotonic(), packs.wait_seconds
            batches, taken = self._take(packs)
            targets = [self.drafter.targets(batch, self.frozen) for batch in batches]
            weights, stopping = self._weights(targets)
            sums = self._accumulate(batches, targets, weights)
            norm = clip_gradients(self.drafter.parameters(), self.setup.config.optim.max_grad_norm)
            if not math.isfinite(norm):
                raise UserError(
                    f"step {step}: the gradient is not finite",
                    where=f"packs {taken} of the plan",
                    fix="lower optim.lr; nothing of this step was applied, and the last checkpoint is whole",
                )
            rate = learning_rate(self.setup.config.optim, step, total)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.optimizer.zero_grad()
            seconds = time.monotonic() - began
            self._log(step, sums, batches, norm, rate, seconds, packs.wait_seconds - waited)
            self.checkpointer.check()
            if self.checkpointer.due(step + 1, total) or stopping:
                self.checkpointer.save(step + 1, self.drafter, self.optimizer, wait=stopping or step + 1 == total)
            if stopping and step + 1 < total:
                return False
        return True

    def _take(self, packs: Iterator[tuple[int, Pack, Features]]) -> tuple[list[Batch], list[int]]:
        batches, taken = [], []
        for _ in range(self.packs_per_rank):
            index, pack, features = next(packs)
            address = (self.setup.config.seed, index)
            batches.append(Batch.of(pack, features, dtype=self.frozen.dtype, device=self.world.device, address=address))
            taken.append(index)
        return batches, taken

    def _weights(self, targets) -> tuple[torch.Tensor, bool]:
        """[K]: what one draft of each step weighs, from denominators summed over micro-batches and ranks; and whether any
        rank was asked to stop (it travels with the same reduction)."""
        sent = torch.cat([sum(t.denominators for t in targets).cpu(), torch.tensor([float(self.stop_requested)])])
        summed = self.world.sum(sent.to(self.world.device)).cpu()
        stop, divisors = float(summed[-1]), self.drafter.divisors(summed[:-1]).tolist()
        # FSDP averages gradients over the ranks; the loss is one sum over all of them.
        weights = [w * self.world.size / max(d, 1.0) for w, d in zip(self.drafter.step_weights, divisors)]
        return torch.tensor(weights, device=self.world.device), stop > 0

    def _accumulate(self, batches, targets, weights: torch.Tensor) -> torch.Tensor:
        """Forward and backward of every micro-batch; gradients are reduced over the ranks once, with the last one."""
        sums = 0
        for i, (batch, target) in enumerate(zip(batches, targets)):
            self.drafter.set_requires_gradient_sync(i == len(batches) - 1)
            loss, judged = self.drafter(batch, target, self.frozen, weights)
            loss.backward()
            sums = sums + judged
        return sums

    def _log(self, step, sums, batches, norm, rate, seconds, waited) -> None:
        tokens = sum(len(batch.input_ids) for batch in batches)
        supervised = sum(int(batch.supervised.sum()) for batch in batches)
        extra = torch.tensor([tokens, supervised, waited / self.world.size], dtype=torch.double)
        everything = self.world.sum(torch.cat([sums.flatten(), extra.to(sums.device)])).cpu()
        if self.tracker is None:
            return
        numbers = summarise(self.drafter, everything[:-3].view(sums.shape))
        tokens, supervised, waited = everything[-3:].tolist()
        self.tracker.log(
            {
                "step": step,
                **numbers,
                "grad_norm": norm,
                "lr": rate,
                "packs": self.setup.config.global_batch,
                "tokens": int(tokens),
                "supervised_tokens": int(supervised),
                "seconds": seconds,
                "wait_seconds": waited,
            }
        )
