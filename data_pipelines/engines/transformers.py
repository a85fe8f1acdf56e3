"""Features by a plain transformers forward with hooks."""

from __future__ import annotations

import numpy as np
import torch

from ..features import Features, FeatureSpec, check_values
from ..packing import position_ids
from .anatomy import anatomy, tap_hidden_states
from .targets import Target


class TransformersEngine:
    """Runs the decoder (not the head) over one pack at a time, as one row whose position ids restart at each document.

    transformers derives the block-diagonal causal mask from those position ids. On construction two short documents are
    computed packed and alone. If they do not agree, the architecture ignores the boundaries (gpt-oss in transformers 5.19,
    linear attention), and its packs are computed document by document.
    """

    def __init__(self, target: Target, spec: FeatureSpec):
        self.spec = spec
        self.model = target.load_model(getattr(torch, spec.dtype))
        self._decoder = anatomy(self.model).decoder
        self._device = next(self.model.parameters()).device
        self._whole_packs = True
        self._whole_packs = self._keeps_apart(target.config.vocab_size)

    @torch.no_grad()  # not inference_mode: the trainer differentiates through functions of these tensors
    def compute(self, input_ids: np.ndarray, lengths: tuple[int, ...]) -> Features:
        if self._whole_packs:
            features = self._forward(input_ids, lengths)
        else:
            ends = np.cumsum(lengths)
            parts = [self._forward(input_ids[end - n : end], (n,)) for end, n in zip(ends, lengths)]
            features = Features(torch.cat([part.taps for part in parts]), torch.cat([part.final for part in parts]))
        check_values(features, self.spec)
        return features

    def _forward(self, input_ids: np.ndarray, lengths: tuple[int, ...]) -> Features:
        ids = torch.from_numpy(np.asarray(input_ids, dtype=np.int64))[None].to(self._device)
        positions = torch.from_numpy(position_ids(lengths).astype(np.int64))[None].to(self._device)
        with tap_hidden_states(self.model, self.spec.taps) as recorder:
            self._decoder(input_ids=ids, position_ids=positions, use_cache=False)
        return Features(recorder.taps[0].cpu(), recorder.final[0].cpu())

    def _keeps_apart(self, vocab_size: int) -> bool:
        rng = np.random.default_rng(0)
        first, second = (rng.integers(0, vocab_size, n, dtype=np.int32) for n in (7, 9))
        packed = self.compute(np.concatenate([first, second]), (7, 9))
        alone = self.compute(second, (9,))
        a, b = packed.final[7:].float(), alone.final.float()
        difference = ((a - b).norm() / b.norm()).item()
        # Rounding differs between the two shapes; a leak across the boundary changes the states by tens of per cent.
        return difference < (0.05 if self.spec.dtype == "bfloat16" else 1e-3)
