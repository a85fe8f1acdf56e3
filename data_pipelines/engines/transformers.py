"""Features by a plain transformers forward with hooks."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from ..features import Features, FeatureSpec, check_values
from ..packing import position_ids
from .anatomy import anatomy, length_limit, tap_hidden_states, text_config
from .probe import Finding, probe, refuse_misfits
from .readout import error_limit, random_tokens, relative_error
from .targets import Target

_SHORT, _LONG = 7, 9  # documents of the probe, in tokens


class TransformersEngine:
    """Runs the decoder (not the head) over one pack at a time, as one row whose position ids restart at each document.

    transformers derives the block-diagonal causal mask from those position ids. On construction the target is probed
    (`probe`), and short documents are computed packed and alone. If they do not agree, the architecture ignores the
    boundaries (gpt-oss in transformers 5.19, linear attention), and its packs are computed document by document. So are
    packs with a long document if the RoPE factors of a row depend on its longest document, and packs longer than a chunk if
    attention stays within chunks (Llama 4), which transformers counts from the start of the row.
    Raises UserError when the target is not what it is taken for.
    """

    def __init__(self, target: Target, spec: FeatureSpec, model: nn.Module | None = None):
        """model: the target, if it is loaded already."""
        self.spec = spec
        self.model = model if model is not None else target.load_model(getattr(torch, spec.dtype))
        refuse_misfits(self.model, probe(self.model), tapped=bool(spec.taps))
        self._decoder = anatomy(self.model).decoder
        self._device = next(self.model.parameters()).device
        self._limit = length_limit(self.model.config)
        self._chunk = getattr(text_config(self.model.config), "attention_chunk_size", None)
        self._packs = self._keeps_apart()
        self._long_packs = self._packs and self._limit is None
        longest = getattr(target.config, "max_position_embeddings", None)
        if self._long_packs and longest:  # dependence on the length that the config does not declare
            self._packs = self._long_packs = self._keeps_apart(longest - 1)

    @property
    def packing(self) -> Finding:
        """How packs are computed, and why."""
        if not self._packs:
            return Finding("packing", True, "packed documents would see each other: computed one by one")
        if not self._long_packs:
            says = f"packed; one by one if a document has {self._limit:,} tokens or more (RoPE depends on the longest)"
            return Finding("packing", True, says)
        if self._chunk is not None:
            says = f"packed; one by one in packs of over {self._chunk:,} tokens (attention is chunked along the row)"
            return Finding("packing", True, says)
        return Finding("packing", True, "packed documents are computed as if alone")

    @torch.no_grad()  # not inference_mode: the trainer differentiates through functions of these tensors
    def compute(self, input_ids: np.ndarray, lengths: tuple[int, ...]) -> Features:
        reaches = self._limit is not None and max(lengths) >= self._limit
        chunked = self._chunk is not None and len(input_ids) > self._chunk
        if (self._long_packs or (self._packs and not reaches)) and not chunked:
            features = self._forward(input_ids, position_ids(lengths))
        else:
            ends = np.cumsum(lengths)
            parts = [self._alone(input_ids[end - n : end]) for end, n in zip(ends, lengths)]
            features = Features(torch.cat([part.taps for part in parts]), torch.cat([part.final for part in parts]))
        check_values(features, self.spec)
        return features

    def _alone(self, input_ids: np.ndarray) -> Features:
        if not self._long_packs and self._limit is not None and len(input_ids) >= self._limit:
            # RoPE that grows with the text remembers the longest one so far; a short one makes it forget.
            self._forward(input_ids[:1], position_ids((1,)))
        return self._forward(input_ids, None)

    def _forward(self, input_ids: np.ndarray, positions: np.ndarray | None) -> Features:
        """positions: None for those that the family itself counts for one text (Kosmos begins with 2)."""
        ids, positions = (
            None if values is None else torch.from_numpy(np.asarray(values, dtype=np.int64))[None].to(self._device)
            for values in (input_ids, positions)
        )
        with tap_hidden_states(self.model, self.spec.taps) as recorder:
            self._decoder(input_ids=ids, position_ids=positions, use_cache=False)
        return Features(recorder.taps[0].cpu(), recorder.final[0].cpu())

    @torch.no_grad()
    def _keeps_apart(self, far: int | None = None) -> bool:
        """Whether a document has the same states behind, and before, another one. far: the other one has a token at that
        position (which stands for a text of that length)."""
        ids = random_tokens(self.model, _SHORT + _LONG, seed=3)[0].cpu().numpy()
        first, second, both = None, None, position_ids((_SHORT, _LONG))
        if far is not None:
            first, second = position_ids((_SHORT,)), position_ids((_LONG,))
            second[-1] = both[-1] = far
        alone = [self._forward(ids[:_SHORT], first).final, self._forward(ids[_SHORT:], second).final]
        packed = self._forward(ids, both).final
        # Rounding differs between the two shapes; a leak across the boundary changes the states by tens of per cent.
        limit = 5e-2 if self.spec.dtype == "bfloat16" else 100 * error_limit(torch.float32)
        return relative_error(packed.float(), torch.cat(alone).float()) < limit
