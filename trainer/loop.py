"""The loop: next packs → denominators → forward and backward → clip, step, log → maybe a checkpoint."""

from __future__ import annotations

import logging
import math
import time

import torch

from data_pipelines.errors import UserError
from data_pipelines.logs import fields
from data_pipelines.stream.consumer import GaveUp, Prefetcher

from .batch import Batch
from .checkpoint import Checkpointer, newest_step
from .metrics import summarise
from .optim import learning_rate
from .parallel import Strategy, World
from .parallel.context import ContextGroup, SharedPacks
from .reporting import Progress
from .setup import RunSetup
from .target import FrozenTarget
from .tracking import Tracker

log = logging.getLogger("trainer")

PREEMPTED = 75  # exit status of a run that was told to stop; all that was done is in a checkpoint
_STOP_SECONDS = 5.0  # for which packs may still come after that


class Trainer:
    """One rank. `request_stop` may be called at any time (by a signal); the ranks agree on it at their next step.

    They agree in its first collective. A rank that was told to stop, and to which no pack comes, takes part in that
    without its packs: all ranks then leave the step undone, rather than wait for packs that nobody may send any more.
    """

    def __init__(
        self,
        setup: RunSetup,
        world: World,
        context: ContextGroup,
        strategy: Strategy,
        frozen: FrozenTarget,
        checkpointer: Checkpointer,
        tracker: Tracker | None,
        progress: Progress,
        session: str,
    ):
        self.setup, self.world, self.context = setup, world, context
        self.strategy, self.drafter = strategy, strategy.drafter
        self.frozen, self.checkpointer, self.tracker = frozen, checkpointer, tracker
        self.packs_per_rank = setup.config.global_batch // context.data_size
        self.progress, self.session = progress, session
        self._stop_requested_at: float | None = None

    def request_stop(self) -> None:
        if self._stop_requested_at is None:
            self._stop_requested_at = time.monotonic()

    def run(self, packs: Prefetcher | SharedPacks, start: int) -> bool:
        """Steps start … total_steps-1. False when it was asked to stop; what was done is in a checkpoint then."""
        total = self.setup.total_steps
        for step in range(start, total):
            began, waited = time.monotonic(), packs.wait_seconds
            try:
                batches, taken = self._take(packs)
            except GaveUp:
                batches, taken = None, []
            targets = None if batches is None else [self.drafter.targets(batch, self.frozen) for batch in batches]
            weights, stopping, undone = self._weights(targets)
            if undone:
                self._leave_undone(step, start)
                return False
            sums = self._accumulate(batches, targets, weights)
            rate = learning_rate(self.setup.config.optim, step, total)
            norm = self.strategy.step(rate)
            if not math.isfinite(norm):
                self.checkpointer.close()  # every rank is here: what is being written is not lost
                raise self._diverged(step)
            seconds = time.monotonic() - began
            self._log(step, sums, batches, taken, norm, rate, seconds, packs.wait_seconds - waited)
            self.checkpointer.check()
            if self.checkpointer.due(step + 1, total) or stopping:
                self.checkpointer.save(step + 1, self.strategy, wait=stopping or step + 1 == total)
            if stopping and step + 1 < total:
                return False
        return True

    def _diverged(self, step: int) -> UserError:
        """Nothing of this step was applied."""
        packs, rate = self.setup.config.global_batch, self.setup.config.optim.lr
        saved = newest_step(self.setup.run_dir)
        lower = f"lower optim.lr: the same command with optim.lr={rate / 2:g}"
        again = f"{lower} 'allow=[optim.lr]' goes on from step {saved}" if saved else f"{lower} begins anew"
        earlier = ", or from an earlier checkpoint with resume=<run_dir>/checkpoints/step_<n>" if saved else ""
        return UserError(
            f"step {step}: the gradient is not finite",
            where=f"packs {step * packs}…{(step + 1) * packs - 1} of the plan",
            fix=f"{again}{earlier}; {'' if saved else 'no checkpoint was written yet, and '}nothing of this step was applied",
        )

    def _take(self, packs: Prefetcher | SharedPacks) -> tuple[list[Batch], list[int]]:
        """Raises GaveUp when it was asked to stop and no pack comes."""
        batches, taken = [], []
        for _ in range(self.packs_per_rank):
            index, pack, features = packs.next(self._stop_is_overdue)
            make, part, address = Batch.of, self.context.part, (self.setup.config.seed, index)
            if features is None:  # in quarantine: weighs nothing, but all ranks still take the same collectives
                make, features = Batch.weightless, self.setup.spec
            dtype, device = self.frozen.dtype, self.world.device
            batches.append(make(pack, features, dtype=dtype, device=device, address=address, part=part))
            taken.append(index)
        return batches, taken

    def _stop_is_overdue(self) -> bool:
        asked = self._stop_requested_at
        return asked is not None and time.monotonic() - asked > _STOP_SECONDS

    def _leave_undone(self, step: int, start: int) -> None:
        """Every rank is here: nothing of this step was applied on any."""
        if step > start:
            self.checkpointer.save(step, self.strategy, wait=True)
        kept = f"{step} steps are in the checkpoint" if step else "no step was done yet"
        log.warning("told to stop while a rank waited for packs that did not come; %s", kept)

    def _weights(self, targets) -> tuple[torch.Tensor, bool, bool]:
        """[K]: what one draft of each step weighs, from denominators summed over micro-batches and ranks; and what travels
        with the same reduction: whether any rank was asked to stop, whether any has no packs for this step (targets is
        None there)."""
        mine = torch.zeros(self.drafter.depth) if targets is None else sum(t.denominators for t in targets).cpu()
        flags = torch.tensor([self._stop_requested_at is not None, targets is None], dtype=torch.double)
        summed = self.world.sum(torch.cat([mine.double(), flags]).to(self.world.device)).cpu()
        (stop, undone), divisors = summed[-2:].tolist(), self.drafter.divisors(summed[:-2]).tolist()
        weights = [w / max(d, 1.0) for w, d in zip(self.drafter.step_weights, divisors)]
        return torch.tensor(weights, device=self.world.device), stop > 0, undone > 0

    def _accumulate(self, batches, targets, weights: torch.Tensor) -> torch.Tensor:
        """Forward and backward of every micro-batch."""
        sums = 0
        for i, (batch, target) in enumerate(zip(batches, targets)):
            loss, judged = self.strategy(batch, target, self.frozen, weights)
            self.strategy.backward(loss, last=i == len(batches) - 1)
            sums = sums + judged
        return sums

    def _log(self, step, sums, batches, taken, norm, rate, seconds, waited) -> None:
        trained = [batch for batch in batches if not batch.quarantined]
        packs = len(trained) if self.context.fetches else 0  # of those that ranks share, each counts once
        tokens = sum(batch.tokens for batch in trained)
        supervised = sum(int(batch.supervised[batch.own].sum()) for batch in trained)
        extra = torch.tensor([packs, tokens, supervised, waited / self.world.size], dtype=torch.double)
        everything = self.world.sum(torch.cat([sums.flatten(), extra.to(sums.device)])).cpu()
        all_packs, all_tokens, all_supervised, all_waited = everything[-4:].tolist()
        row = {
            "step": step,
            **summarise(self.drafter, everything[:-4].view(sums.shape)),
            "grad_norm": norm,
            "lr": rate,
            "packs": int(all_packs),
            "tokens": int(all_tokens),
            "supervised_tokens": int(all_supervised),
            "seconds": seconds,
            "wait_seconds": all_waited,
        }
        if self.tracker is not None:
            self.tracker.log(row)
        self.progress.stepped(row, seconds=seconds, waited=waited, tokens=tokens)
        log.info("step", extra=fields(step=step, packs=",".join(map(str, taken)), session=self.session))
