"""How a drafter is judged."""

from __future__ import annotations

from dataclasses import dataclass


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
