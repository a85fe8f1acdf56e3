"""What one pack gives a trainer rank to do: how many rows run at each draft step, and how many keys their queries meet.

`measured_work` counts a real batch exactly; `expected_work` is what a plan knows before there are data. Letters: T tokens
of a pack, K draft steps, N blocks of B slots, D draft vocabulary.
"""

from __future__ import annotations

import numpy as np

from trainer.batch import Batch
from trainer.drafters import Drafter
from trainer.drafters.cost import Expected, Work, chunk_pairs
from trainer.drafters.merged import CHUNK_ROWS
from trainer.losses import CHUNK_ELEMENTS

from .volume import Volume


def measured_work(drafter: Drafter, batch: Batch) -> Work:
    """Of one batch, exactly."""
    counts = drafter.rounds(batch)
    starts = (np.arange(len(batch.input_ids)) - batch.positions.cpu().numpy()).astype(np.int64)
    step, row = counts.nonzero().unbind(1)
    teacher = np.sort((row + drafter.first + step).cpu().numpy())
    size = max(1, CHUNK_ELEMENTS // drafter.draft_vocab_size)
    every = np.arange(len(starts))
    rows = [counts[k].nonzero().squeeze(1).cpu().numpy() for k in range(drafter.depth)]
    return Work(
        tokens=len(starts),
        rows=tuple(len(r) for r in rows),
        teacher_rows=len(np.unique(teacher)),
        chunk_rows=sum(len(np.unique(teacher[i : i + size])) for i in range(0, len(teacher), size)),
        all_pairs=chunk_pairs(every, starts),
        pairs=drafter.measured_pairs(rows, starts),
        anchors=drafter.anchors_of(rows),
    )


def expected_work(drafter: Drafter, volume: Volume, pack_tokens: int) -> Work:
    """Of the average pack of a volume: documents of its mean length, each with `runs` trained stretches of equal length, the
    last of which ends where the document does."""
    tokens = volume.tokens_per_pack(pack_tokens)
    documents = tokens / volume.mean_tokens
    stretches = documents * volume.runs
    length = volume.mean_tokens * volume.supervised / volume.runs  # of one stretch
    candidates = [stretches * max(0.0, length - 1 - k) for k in range(drafter.depth)]
    reach = volume.typical_tokens * (1 - volume.supervised / 2)  # where in its document a trained row lies, on average
    rows, pairs, teacher, anchors = drafter.expected_work(Expected(tokens, stretches, candidates, reach))
    chunks = sum(rows) * drafter.draft_vocab_size / CHUNK_ELEMENTS
    return Work(
        tokens=tokens,
        rows=tuple(rows),
        teacher_rows=min(teacher, sum(rows)),
        chunk_rows=min(teacher + chunks, sum(rows)),
        all_pairs=tokens * min(tokens, volume.typical_tokens / 2 + CHUNK_ROWS),
        pairs=pairs,
        anchors=anchors,
    )
