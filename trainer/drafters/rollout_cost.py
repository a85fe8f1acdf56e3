"""What a drafter costs that extends a chain token by token (EAGLE-3, MTP). Letters: T rows of a pack, K draft steps."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from .cost import SAMPLE, TRAINED, AttentionShape, Cost, Flops, Sketch, chunk_pairs, elements, kept_bytes, layer_key
from .merged import CHUNK_ROWS


def merged_flops(shape: AttentionShape, pairs: float) -> Flops:
    """`merged_attention`: forward scores and values; backward scores again, and gradients of q, k, v and the weights."""
    return Flops(attention=2.0 * shape.heads * pairs * (4 * shape.key + 3 * shape.value))


def recomputed(body: Flops) -> Flops:
    """One forward more."""
    return Flops(body.matmul * 4 / 3, body.attention * 9 / 7)


class RolloutCost(Cost):
    narrows = False  # whether the first step runs only the rows that count, beyond their keys
    attending: int

    @property
    def shape(self):
        """The config of the layers."""
        return getattr(self, "layer_config", None) or self.target_config

    def body_flops(self, work, recompute):
        """Of a drafter whose layers do not attend: the first step runs every row, later ones those that count."""
        modules = (child for name, child in self.named_children() if name != "lm_head")
        body = Flops(TRAINED * elements(modules) * (work.tokens + sum(work.rows[1:])))
        return recomputed(body) if recompute else body

    def measured_pairs(self, rows, starts):
        return tuple(chunk_pairs(wanted, starts) for wanted in rows)

    def expected_work(self, pack):
        rows, _, teacher, anchors = super().expected_work(pack)
        pairs = [r * min(pack.tokens, pack.reach + CHUNK_ROWS * pack.tokens / r) if r else 0.0 for r in rows]
        return rows, tuple(pairs), teacher, anchors

    def kept_per_row(self, width, dtype):
        """Of the first step; in a later step every row is both. The pack's own features are not counted."""
        drafter, kind = self.to(getattr(torch, dtype)), getattr(torch, dtype)

        def states(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, width, device="meta", dtype=kind)

        frozen = SimpleNamespace(embed=lambda tokens: states(*tokens.shape), normed=lambda final: final)
        index = torch.empty(SAMPLE, dtype=torch.long, device="meta")
        taps, final = states(SAMPLE, len(getattr(drafter, "taps", ()))), states(SAMPLE)

        def step(rows: torch.Tensor | None) -> None:
            sketches = [Sketch(True) for _ in range(drafter.attending)]
            hidden = drafter.start(taps, final, frozen)
            drafter.normed(drafter.run_layers(states(SAMPLE), hidden, index, sketches, rows))

        with torch.device("meta"):
            if not self.narrows:
                each = kept_bytes(drafter, lambda: step(None), (taps, final)) / SAMPLE
                return each, each
            whole, half = (kept_bytes(drafter, lambda k=k: step(index[: SAMPLE // k]), (taps, final)) for k in (1, 2))
        queried = (whole - half) / (SAMPLE // 2)
        return whole / SAMPLE - queried, queried

    def activations(self, work, kept, state, recompute):
        whole, queried = kept
        first, rest = whole * work.tokens, sum(work.rows[1:])
        made = 0.0  # keys and values of a row
        if self.attending:
            shape, last = self.shape, self.shape.num_hidden_layers - 1
            heads = layer_key(shape, "num_key_value_heads", last) or shape.num_attention_heads
            size = layer_key(shape, "head_dim", last) or shape.hidden_size // shape.num_attention_heads
            made = self.attending * 2 * heads * size * state / shape.hidden_size
        # Each step keeps the keys and values of the steps before it, cut to its own rows.
        diagonals = made * sum(max(0, k - 1) * r for k, r in enumerate(work.rows))
        queries, later = (work.rows[0], whole + queried) if self.narrows else (0.0, queried)
        if not recompute:
            return first + queried * queries + later * rest + diagonals, 0.0
        again = max(first + queried * queries, (later + made * (self.depth - 1)) * max(work.rows[1:], default=0.0))
        return (work.tokens + rest) * (3 * state + made), again

    def score_elements(self, work):
        if not self.attending:
            return 0.0
        span = max((p / r for p, r in zip(work.pairs, work.rows, strict=True) if r), default=0.0)
        return self.shape.num_attention_heads * CHUNK_ROWS * span
