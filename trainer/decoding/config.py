"""How a drafter is judged."""

from __future__ import annotations

from dataclasses import dataclass

from data_pipelines.errors import UserError


@dataclass
class EvaluateConfig:
    """Greedy chain decoding on held-out prompts, `draft_tokens` drafted a round.

    prompts: `builtin:eval` (generated, disjoint from the training prompts) or a `.jsonl` file of rows with `messages`
    and, optionally, `domain`.
    """

    name: str = "chain"
    enabled: bool = True
    prompts: str = "builtin:eval"
    max_prompts: int = 40
    max_new_tokens: int = 96
    draft_tokens: int = 5
    batch_size: int = 8

    def __post_init__(self) -> None:
        for key in ("max_new_tokens", "draft_tokens", "batch_size"):
            if getattr(self, key) < 1:
                raise UserError(f"evaluate.{key}={getattr(self, key)}; it must be at least 1")
