"""Floating-point operations, two for each multiplication that is added up: of the target's forward, and of a drafter's
training forward and backward with everything that this project's code computes for it (draft steps, attention with its
scores made again, the teacher's and the drafter's head). Elementwise work is not counted.

A test compares all of it with torch.utils.flop_counter on real models.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from trainer.drafters import Drafter
from trainer.drafters.dflash import DFlash
from trainer.drafters.dspark import DSpark
from trainer.drafters.eagle3 import Eagle3
from trainer.drafters.mtp import MTP

from .shapes import AttentionShape, TargetShape, attention_shapes, matrix_elements, routed_share
from .work import Work

TRAINED = 6  # operations for an element of a matrix: forward, gradient of its input, gradient of itself
FIRST = 4  # the same where the input needs no gradient


@dataclass(frozen=True)
class Flops:
    """matmul: in the dtype of the computation. attention: scores and values, which the trainer computes in float32."""

    matmul: float = 0.0
    attention: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.matmul + other.matmul, self.attention + other.attention)

    @property
    def total(self) -> float:
        return self.matmul + self.attention


def target_flops(target: TargetShape, tokens: float, keys: float) -> Flops:
    """The decoder layers' forward over `tokens` tokens whose queries meet `keys` keys each, fewer in layers with a window."""
    scores = sum(a.heads * (a.key + a.value) * (min(keys, a.window) if a.window else keys) for a in target.attention)
    return Flops(2.0 * tokens * target.matrices, 2.0 * tokens * scores)


def training_flops(drafter: Drafter, work: Work, target: TargetShape, *, recompute: bool = False) -> Flops:
    """Of one pack: forward and backward. recompute: what a step keeps is made again in the backward."""
    if isinstance(drafter, DFlash):
        body = _blocks(drafter, work)
    elif isinstance(drafter, Eagle3):
        body = _eagle3(drafter, work)
    else:
        body = _mtp(drafter, work)
    if recompute:  # one forward more
        body = Flops(body.matmul * 4 / 3, body.attention * (5 / 4 if isinstance(drafter, DFlash) else 9 / 7))
    return body + _heads(drafter, work, target)


def _heads(drafter: Drafter, work: Work, target: TargetShape) -> Flops:
    """The teacher's logits, over the whole vocabulary and over the draft's, and the drafter's with their gradients."""
    width, passes = target.hidden, 2 + (getattr(drafter, "lm_head", None) is not None)
    if isinstance(drafter, DSpark) and drafter.markov_head is not None:
        width, passes = width + drafter.markov_head.rank, 3  # [W | W2] is one head, of which a part is learnt
    if isinstance(drafter, DFlash) and drafter.config.weighting == "dpace":
        passes += 1
    size = drafter.draft_vocab_size
    teacher = 2.0 * target.hidden * (target.vocabulary * work.teacher_rows + size * work.chunk_rows)
    return Flops(teacher + 2.0 * size * width * work.drafts * passes)


def _elements(modules: Iterable[nn.Module]) -> int:
    return sum(matrix_elements(module, 1.0) for module in modules)


def _eagle3(drafter: Eagle3, work: Work) -> Flops:
    normed_first = drafter.config.norm_before_fc or drafter.config.fc_norm
    total = Flops((TRAINED if normed_first else FIRST) * drafter.fc.weight.numel() * work.tokens)
    shape, last = drafter.layer_config, len(drafter.layers) - 1
    score = AttentionShape(shape.num_attention_heads, shape.head_dim, shape.head_dim)
    for i, layer in enumerate(drafter.layers):
        keys = _elements([layer.self_attn.k_proj, layer.self_attn.v_proj])
        rest = matrix_elements(layer, 1.0) - keys
        queries = work.rows[0] if i == last else work.tokens  # the first step of the last layer
        later = sum(work.rows[1:])
        total += Flops(TRAINED * (keys * (work.tokens + later) + rest * (queries + later)))
        first = work.pairs[0] if i == last else work.all_pairs
        total += _merged(score, first + sum(work.pairs[1:]))
    return total


def _mtp(drafter: MTP, work: Work) -> Flops:
    """A module's first step runs every row; later ones run those that count, unless the form says otherwise."""
    config = drafter.target_config
    attention = attention_shapes(config)[-1]
    every_row = drafter.config.form == "chained" or drafter.config.attention == "own_step"
    module = matrix_elements(drafter.mtp_layers[0], routed_share(config))
    rows = drafter.depth * work.tokens if every_row else work.tokens + sum(work.rows[1:])
    total = Flops(TRAINED * module * rows)
    pairs = drafter.depth * work.all_pairs if every_row else work.all_pairs + sum(work.pairs[1:])
    return total + _merged(attention, pairs)


def _merged(shape: AttentionShape, pairs: float) -> Flops:
    """`merged_attention`: forward scores and values; backward scores again, and gradients of q, k, v and the weights."""
    return Flops(attention=2.0 * shape.heads * pairs * (4 * shape.key + 3 * shape.value))


def _blocks(drafter: DFlash, work: Work) -> Flops:
    total = Flops(FIRST * drafter.fc.weight.numel() * work.tokens)
    slots = work.anchors * drafter.config.block_size
    shape = drafter.layer_config
    for layer, pairs in zip(drafter.layers, work.pairs, strict=True):
        keys = _elements([layer.self_attn.k_proj, layer.self_attn.v_proj])
        total += Flops(TRAINED * (keys * work.tokens + matrix_elements(layer, 1.0) * slots))
        # forward, forward again (its scores are not kept), and twice as much backward
        total += Flops(attention=4 * 2.0 * shape.num_attention_heads * pairs * 2 * shape.head_dim)
    if isinstance(drafter, DSpark):
        drafts = work.anchors * drafter.depth
        parts = [p for p in (drafter.markov_head, drafter.confidence_head) if p is not None]
        linears = [m for part in parts for n, m in part.named_children() if n in ("gate_proj", "joint_proj", "proj")]
        total += Flops(TRAINED * _elements(linears) * drafts)
    return total
