"""Which target tokens a drafter with a smaller vocabulary can propose: those that answers use most.

The counts are made once, while the documents are written, and lie beside them in the cache: their key is therefore the
documents', a hash of the data, the tokenizer and the options.
"""

from __future__ import annotations

import numpy as np
import torch

from ..documents import Documents
from ..errors import UserError


def draft_vocabulary(documents: Documents, size: int, target_vocab: int) -> torch.Tensor:
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


def coverage(documents: Documents, vocabulary: torch.Tensor, target_vocab: int) -> float:
    """The share of trained-on tokens that the vocabulary holds, in [0, 1]; 1 when there is none."""
    counts = label_counts(documents, target_vocab)
    total = int(counts.sum())
    return int(counts[vocabulary.numpy()].sum()) / total if total else 1.0


def label_counts(documents: Documents, target_vocab: int) -> np.ndarray:
    """int64 [target_vocab]: how often each token is trained on."""
    counts = documents.label_counts
    if len(counts) > target_vocab:
        highest = len(counts) - 1
        raise UserError(
            f"token {highest} is outside the target's vocabulary of {target_vocab}",
            where=documents.origin_of_token(int(np.argmax(documents.input_ids == highest))),
            fix="use the target's own tokenizer",
        )
    return np.pad(counts, (0, target_vocab - len(counts)))
