"""Floating-point operations, two for each multiplication that is added up: of the target's forward, and of a drafter's
training forward and backward with everything that this project's code computes for it (draft steps, attention with its
scores made again, the teacher's and the drafter's head). Elementwise work is not counted.

A test compares all of it with torch.utils.flop_counter on real models.
"""

from __future__ import annotations

from trainer.drafters import Drafter
from trainer.drafters.cost import Flops, Work

from .shapes import TargetShape


def target_flops(target: TargetShape, tokens: float, keys: float) -> Flops:
    """The decoder layers' forward over `tokens` tokens whose queries meet `keys` keys each, fewer in layers with a window."""
    scores = sum(a.heads * (a.key + a.value) * (min(keys, a.window) if a.window else keys) for a in target.attention)
    return Flops(2.0 * tokens * target.matrices, 2.0 * tokens * scores)


def training_flops(drafter: Drafter, work: Work, target: TargetShape, *, recompute: bool = False) -> Flops:
    """Of one pack: forward and backward, with the teacher's logits over the whole vocabulary and over the draft's, and the
    drafter's with their gradients. recompute: what a step keeps is made again in the backward."""
    size = drafter.draft_vocab_size
    teacher = 2.0 * target.hidden * (target.vocabulary * work.teacher_rows + size * work.chunk_rows)
    heads = 2.0 * size * drafter.head_width(target.hidden) * work.drafts * drafter.head_passes()
    return drafter.body_flops(work, recompute) + Flops(teacher + heads)
