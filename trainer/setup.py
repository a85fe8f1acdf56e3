"""From a config to everything that a run is made of before its first step: target, documents, vocabulary, plan, contract.

Every process that needs these makes them itself, from the config alone: the ranks, the launcher, the judge. What takes
long is kept in the user's cache, keyed by content.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from data_pipelines.conversations.dataset import training_data
from data_pipelines.conversations.prepare import Prepared
from data_pipelines.conversations.vocabulary import draft_vocabulary
from data_pipelines.documents import Documents
from data_pipelines.engines import Target, resolve_dtype, resolve_target
from data_pipelines.errors import UserError
from data_pipelines.features import FeatureSpec
from data_pipelines.packing import Plan
from data_pipelines.run_folder import RunFolder

from .checkpoint import Changes, choose_checkpoint
from .config import RunConfig
from .drafters import DRAFTERS, Drafter, build_drafter
from .export.saved import SavedDrafter
from .identity import changes, run_identity
from .start import begin_from
from .target import FrozenTarget


@dataclass(frozen=True)
class RunSetup:
    """kept: int64 [D], the target ids of the draft vocabulary, ascending; None for the whole vocabulary. spec: what the
    features are of. start: the drafter that this one begins from, if it does not begin anew; begins: the same in words.
    total_steps: optimizer steps of the run."""

    config: RunConfig
    run_dir: Path
    target: Target
    prepared: Prepared
    kept: torch.Tensor | None
    spec: FeatureSpec
    plan: Plan
    start: SavedDrafter | None = None
    begins: str = ""

    @cached_property
    def total_steps(self) -> int:
        steps = len(self.plan) // self.config.global_batch
        return min(steps, self.config.max_steps) if self.config.max_steps else steps

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What decides the weights: a checkpoint of another identity is not resumed."""
        # A longer run has the same packs in the same order, and more of them: its length is in `epochs` and `max_steps`.
        plan, target = self.plan.packs.fingerprint, self.target.fingerprint
        started = {"drafter.init_sha256": self.start.sha256} if self.start else {}
        return {**run_identity(self.config, plan=plan, target=target, dtype=self.spec.dtype), **started}

    @cached_property
    def folder(self) -> RunFolder:
        return RunFolder(self.run_dir)

    @cached_property
    def changes(self) -> Changes:
        """What of the identity may differ from a checkpoint's."""
        return changes(self.config)

    def choose_checkpoint(self) -> Path | None:
        """The checkpoint that this run goes on from, or None. See `checkpoint.choose_checkpoint`."""
        folder = self.folder.checkpoints
        return choose_checkpoint(folder, self.config.resume, self.identity, self.changes, self.total_steps)

    def build_drafter(self, frozen: FrozenTarget) -> Drafter:
        """The untrained drafter of this run: a function of the config, its seed and the target."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.seed)
            drafter = build_drafter(self.config.drafter, self.target.config, self.kept)
        drafter.start_head(frozen)
        if self.start is None:
            drafter.warm_start(self.target)
        else:
            self.start.fill(drafter)
        return drafter


def prepare_run(config: RunConfig) -> RunSetup:
    """Raises UserError on data that cannot be trained on, a vocabulary that does not fit, fewer packs than one step takes."""
    changes(config)
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    target = resolve_target(config.target)
    tokenizer = target.load_tokenizer()
    if len(tokenizer) > target.config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens and the target's embedding {target.config.vocab_size} rows",
            where=target.path,
            fix="use the tokenizer that belongs to this target",
        )
    described, start, begins = begin_from(config.drafter, target)
    config = replace(config, drafter=described.completed(tokenizer, target.config.vocab_size))
    most, asked = config.drafter.max_drafts, config.evaluate.draft_tokens
    if most is not None and asked > most:
        raise UserError(
            f"evaluate.draft_tokens={asked}, and this drafter drafts at most {most} a round",
            fix=f"use evaluate.draft_tokens={most}, or a larger drafter.block_size",
        )
    prepared = training_data(config.data, target, tokenizer, run_dir, config.seed)
    drafter = DRAFTERS[config.drafter.name]
    check_that_drafts_count(prepared.documents, drafter.first)
    size = getattr(config.drafter, "draft_vocab_size", 0)
    if size > target.config.vocab_size:
        raise UserError(
            f"drafter.draft_vocab_size={size} is larger than the target's vocabulary, {target.config.vocab_size}",
            fix="use a smaller one, or 0 for the whole vocabulary",
        )
    kept = start.kept if start else None
    if not start and 0 < size < target.config.vocab_size:
        kept = draft_vocabulary(prepared.documents, size, target.config.vocab_size)
    contract = drafter.contract(config.drafter, target.config.num_hidden_layers)
    dtype = str(resolve_dtype(config.target.dtype)).removeprefix("torch.")
    spec = FeatureSpec(target.fingerprint, contract.taps, target.config.hidden_size, dtype, config.target.engine)
    plan = Plan(prepared.documents, pack_tokens=config.data.pack_tokens, seed=config.seed, epochs=config.epochs)
    if len(plan) < config.global_batch:
        raise UserError(
            f"the data make {len(plan)} packs in all, fewer than one optimizer step takes (global_batch="
            f"{config.global_batch})",
            fix="lower global_batch or data.pack_tokens, raise epochs, or give more data",
        )
    return RunSetup(config, run_dir, target, prepared, kept, spec, plan, start, begins)


def check_that_drafts_count(documents: Documents, first: int) -> None:
    """Raises UserError when no draft of the data counts: no document supervises two neighbouring tokens, a bonus token
    from position `first` on and the one that is drafted after it."""
    for document in documents:
        mask = document.loss_mask[first:]
        if (mask[1:] & mask[:-1]).any():
            return
    raise UserError(
        "no draft of the data counts: a draft is trained where the token before it is supervised, too, and no document"
        " supervises two tokens side by side",
        fix="draftsmith inspect shows what is supervised; look at the loss masks of the data",
    )
