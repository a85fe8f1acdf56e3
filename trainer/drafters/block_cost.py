"""What a drafter costs that drafts a block in one pass (DFlash, DSpark). Letters: T rows of a pack, N blocks of B slots."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from .blocks import CHUNK_SCORES
from .cost import FIRST, SAMPLE, TRAINED, Cost, Flops, Sketch, elements, kept_bytes, matrix_elements


class BlockCost(Cost):
    @classmethod
    def reference_config(cls, anchors):
        return cls.Config(taps=[1, 2, 3], anchors=anchors, mask_token=3, num_layers=3, block_size=6)

    def layers_run(self):
        return len(self.layers)

    def anchors_of(self, rows):
        return len(rows[0])

    def measured_pairs(self, rows, starts):
        return tuple(self._pairs(layer, rows[0], starts) for layer in range(len(self.layers)))

    def _pairs(self, layer: int, anchors: np.ndarray, starts: np.ndarray) -> int:
        """Blocks go in chunks; each slot also meets the slots of its own block. The context ends before the anchor."""
        size, block = self._at_once(len(starts)), self.config.block_size
        window, total = min(self._window(layer), len(starts)), 0
        for i in range(0, len(anchors), size):
            chunk = anchors[i : i + size]
            first = max(int(starts[chunk[0]]), int(chunk[0]) - window)
            total += len(chunk) * block * (max(0, int(chunk[-1]) - first) + block)
        return total

    def _at_once(self, tokens: float) -> int:
        """Blocks in a chunk."""
        slots = self.layer_config.num_attention_heads * self.config.block_size
        return max(1, int(CHUNK_SCORES // (slots * (tokens + self.config.block_size))))

    def _window(self, layer: int) -> float:
        return self.config.sliding_window if self.layer_types[layer] == "sliding_attention" else float("inf")

    def expected_work(self, pack):
        candidates, tokens, block = pack.candidates, pack.tokens, self.config.block_size
        anchors = min(self.config.anchors, candidates[0])
        rows = [anchors * c / candidates[0] if candidates[0] else 0.0 for c in candidates]
        covered = tokens * min(1.0, self._at_once(tokens) / max(anchors, 1.0))  # that a chunk of blocks stretches over
        pairs = [
            anchors * block * (min(tokens, min(pack.reach, self._window(i)) + covered) + block)
            for i in range(len(self.layers))
        ]
        # Blocks overlap where anchors lie close: a teacher row is shared by the drafts that predict from it.
        density = anchors / candidates[0] if candidates[0] else 0.0
        return rows, tuple(pairs), candidates[0] * (1 - (1 - density) ** self.depth), anchors

    def body_flops(self, work, recompute):
        total = Flops(FIRST * self.fc.weight.numel() * work.tokens)
        slots = work.anchors * self.config.block_size
        shape = self.layer_config
        for layer, pairs in zip(self.layers, work.pairs, strict=True):
            keys = elements([layer.self_attn.k_proj, layer.self_attn.v_proj])
            total += Flops(TRAINED * (keys * work.tokens + matrix_elements(layer, 1.0) * slots))
            # forward, forward again (its scores are not kept), and twice as much backward
            total += Flops(attention=4 * 2.0 * shape.num_attention_heads * pairs * 2 * shape.head_dim)
        total += Flops(TRAINED * self.sequential_elements() * work.anchors * self.depth)
        return Flops(total.matmul * 4 / 3, total.attention * 5 / 4) if recompute else total

    def sequential_elements(self) -> int:
        """Elements of the matrices that each draft is multiplied with besides the layers'."""
        return 0

    def head_passes(self):
        return super().head_passes() + (self.config.weighting == "dpace")

    def kept_per_row(self, width, dtype):
        """Of one pass; the rows that draft are the blocks' slots. The pack's own features are not counted."""
        drafter, kind, block = self.to(getattr(torch, dtype)), getattr(torch, dtype), self.config.block_size

        def states(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, width, device="meta", dtype=kind)

        frozen = SimpleNamespace(embed=lambda tokens: states(*tokens.shape))
        index = torch.empty(SAMPLE, dtype=torch.long, device="meta")
        taps = states(SAMPLE, len(drafter.taps))

        def blocks(anchors: int) -> None:
            where = index.new_empty(anchors)
            drafter.run_blocks(where, where, taps, index, [Sketch(False) for _ in drafter.layers], frozen)

        with torch.device("meta"):
            one, two = (kept_bytes(drafter, lambda k=k: blocks(k * SAMPLE), (taps,)) for k in (1, 2))
        queried = (two - one) / (SAMPLE * block)
        return one / SAMPLE - queried * block, queried

    def activations(self, work, kept, state, recompute):
        slots, layers = work.anchors * self.config.block_size, len(self.layers)
        everything = kept[0] * work.tokens + kept[1] * slots
        if not recompute:
            return everything, 0.0
        return (layers + 1) * slots * state + work.tokens * 2 * state, everything / layers

    def score_elements(self, work):
        return min(CHUNK_SCORES, self.layer_config.num_attention_heads * max(work.pairs, default=0.0))
