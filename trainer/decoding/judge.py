"""Judging a drafter that lies somewhere, ours or another's: no run is needed, only its target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from data_pipelines.engines import Target
from data_pipelines.errors import UserError

from ..drafters import Drafter
from ..export.saved import find_drafter, read_drafter
from ..target import FrozenTarget
from .config import EvaluateConfig
from .run import judge_drafter


def judge_saved(target: Target, draft: str, cfg: EvaluateConfig, seed: int, draft_tokens: int | None) -> dict[str, Any]:
    """draft: an export, a run's folder or a hub id. draft_tokens: drafted a round; None: as many as the export says that
    engines should, else cfg's, and at most as many as the drafter can.

    Returns what `evaluate.evaluate` does, and of which drafter. Raises UserError when the drafter cannot be read or is of
    another target, before anything is decoded.
    """
    saved = read_drafter(find_drafter(draft), target)
    most = saved.config.max_drafts
    if most is not None and (draft_tokens or 0) > most:
        raise UserError(
            f"--draft-tokens {draft_tokens}, and this drafter drafts at most {most} a round",
            where=str(saved.path),
            fix=f"use --draft-tokens {most}",
        )
    tokens = draft_tokens or saved.tokens or cfg.draft_tokens
    cfg = replace(cfg, draft_tokens=min(tokens, most or tokens))

    def build(frozen: FrozenTarget) -> Drafter:
        saved.has_own_head(frozen)  # refuses one that this kind of drafter cannot have
        return saved.build(target.config, frozen)

    judged = judge_drafter(target, build, cfg, seed)
    return {"target": target.name, "draft": str(saved.path), "drafter": saved.config.name, **judged}
