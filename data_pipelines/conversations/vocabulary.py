"""Which target tokens a drafter with a smaller vocabulary can propose: those that answers use most."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..errors import UserError
from ..packing import Document


def draft_vocabulary(documents: Sequence[Document], size: int, target_vocab: int) -> torch.Tensor:
    """int64 [size]: the target ids, ascending, that occur most often among the tokens that are trained on.

    Of equally frequent tokens the lower id is kept, so that the result depends on nothing but the documents. Tokens
    that never occur fill up by the same rule.
    Raises UserError when `size` is not from 1 to target_vocab, or a document holds an id outside the target's.
    """
    if not 1 <= size <= target_vocab:
        raise UserError(
            f"a draft vocabulary of {size} tokens does not fit the target's {target_vocab}",
            fix=f"choose a size from 1 to {target_vocab} (0 in a recipe: the whole vocabulary)",
        )
    counts = label_counts(documents, target_vocab)
    kept = np.lexsort((np.arange(target_vocab), -counts))[:size]
    return torch.from_numpy(np.sort(kept).astype(np.int64))


def coverage(documents: Sequence[Document], vocabulary: torch.Tensor, target_vocab: int) -> float:
    """The share of trained-on tokens that the vocabulary holds, in [0, 1]; 1 when there is none."""
    counts = label_counts(documents, target_vocab)
    total = int(counts.sum())
    return int(counts[vocabulary.numpy()].sum()) / total if total else 1.0


def label_counts(documents: Sequence[Document], target_vocab: int) -> np.ndarray:
    """int64 [target_vocab]: how often each token is trained on."""
    for document in documents:
        highest = int(document.input_ids.max(initial=0))
        if highest >= target_vocab:
            raise UserError(
                f"token {highest} is outside the target's vocabulary of {target_vocab}",
                where=document.origin,
                fix="use the target's own tokenizer",
            )
    labels = [d.input_ids[d.loss_mask] for d in documents]
    return np.bincount(np.concatenate([np.zeros(0, np.int32), *labels]), minlength=target_vocab)
