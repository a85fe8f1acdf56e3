"""How a drafter is judged."""

from __future__ import annotations

from dataclasses import dataclass

from data_pipelines.errors import UserError, check_choice


@dataclass
class EvaluateConfig:
    """Greedy chain decoding on held-out prompts, `draft_tokens` drafted a round.

    prompts: `builtin:eval` (generated, disjoint from the training prompts) or a `.jsonl` file of rows with `messages`
    and, optionally, `domain`. before: also judge the untrained drafter. dtype: what target and drafter are computed in; auto:
    float32 where its weights fit on one device or on this machine's GPUs together, else bfloat16, in which a near tie of two
    logits may go either way and a text then differs from plain decoding for no fault of the drafter's.
    """

    name: str = "chain"
    enabled: bool = True
    prompts: str = "builtin:eval"
    max_prompts: int = 40
    max_new_tokens: int = 96
    draft_tokens: int = 5
    batch_size: int = 8
    before: bool = True
    dtype: str = "auto"

    def __post_init__(self) -> None:
        check_choice("evaluate.dtype", self.dtype, ("auto", "float32", "bfloat16"))
        for key in ("max_new_tokens", "draft_tokens", "batch_size"):
            if getattr(self, key) < 1:
                raise UserError(f"evaluate.{key}={getattr(self, key)}; it must be at least 1")
