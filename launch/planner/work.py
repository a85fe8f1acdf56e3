"""What one pack gives a trainer rank to do: how many rows run at each draft step, and how many keys their queries meet.

`measured_work` counts a real batch exactly; `expected_work` is what a plan knows before there are data. Letters: T tokens
of a pack, K draft steps, N blocks of B slots, D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainer.batch import Batch
from trainer.drafters import Drafter
from trainer.drafters.blocks import CHUNK_SCORES
from trainer.drafters.dflash import DFlash
from trainer.drafters.merged import CHUNK_ROWS
from trainer.losses import CHUNK_ELEMENTS

from .volume import Volume


@dataclass(frozen=True)
class Work:
    """rows [K]: drafts that count. teacher_rows: those whose distribution over the whole vocabulary is made. chunk_rows:
    those that the loss projects onto the draft vocabulary (a chunk of the loss makes each of its own once).

    all_pairs: query-key pairs that are computed when every row is a query. pairs [K]: when the rows of a step are; for
    blocks, one number for each layer, own slots included. anchors: N.
    """

    tokens: float
    rows: tuple[float, ...]
    teacher_rows: float
    chunk_rows: float
    all_pairs: float
    pairs: tuple[float, ...]
    anchors: float

    @property
    def drafts(self) -> float:
        return sum(self.rows)


def measured_work(drafter: Drafter, batch: Batch) -> Work:
    """Of one batch, exactly."""
    counts = drafter.rounds(batch)
    starts = (np.arange(len(batch.input_ids)) - batch.positions.cpu().numpy()).astype(np.int64)
    step, row = counts.nonzero().unbind(1)
    teacher = np.sort((row + drafter.first + step).cpu().numpy())
    size = max(1, CHUNK_ELEMENTS // drafter.draft_vocab_size)
    every = np.arange(len(starts))
    rows = [counts[k].nonzero().squeeze(1).cpu().numpy() for k in range(drafter.depth)]
    if isinstance(drafter, DFlash):
        anchors = rows[0]
        pairs = tuple(_block_pairs(drafter, layer, anchors, starts) for layer in range(len(drafter.layers)))
    else:
        anchors, pairs = [], tuple(_chunk_pairs(wanted, starts) for wanted in rows)
    return Work(
        tokens=len(starts),
        rows=tuple(len(r) for r in rows),
        teacher_rows=len(np.unique(teacher)),
        chunk_rows=sum(len(np.unique(teacher[i : i + size])) for i in range(0, len(teacher), size)),
        all_pairs=_chunk_pairs(every, starts),
        pairs=pairs,
        anchors=len(anchors),
    )


def _chunk_pairs(rows: np.ndarray, starts: np.ndarray) -> int:
    """Rows go in chunks, each over the span of keys from its first row's document to its last row."""
    chunks = [rows[i : i + CHUNK_ROWS] for i in range(0, len(rows), CHUNK_ROWS)]
    return sum(len(c) * int(c[-1] - starts[c[0]] + 1) for c in chunks)


def _block_pairs(drafter: DFlash, layer: int, anchors: np.ndarray, starts: np.ndarray) -> int:
    """Blocks go in chunks too; each slot also meets the slots of its own block. The context ends before the anchor."""
    size, block = _blocks_at_once(drafter, len(starts)), drafter.config.block_size
    window = drafter.config.sliding_window if drafter.layer_types[layer] == "sliding_attention" else len(starts)
    total = 0
    for i in range(0, len(anchors), size):
        chunk = anchors[i : i + size]
        first = max(int(starts[chunk[0]]), int(chunk[0]) - window)
        total += len(chunk) * block * (max(0, int(chunk[-1]) - first) + block)
    return total


def _blocks_at_once(drafter: DFlash, tokens: float) -> int:
    slots = drafter.layer_config.num_attention_heads * drafter.config.block_size
    return max(1, int(CHUNK_SCORES // (slots * (tokens + drafter.config.block_size))))


def expected_work(drafter: Drafter, volume: Volume, pack_tokens: int) -> Work:
    """Of the average pack of a volume: documents of its mean length, each with `runs` trained stretches of equal length, the
    last of which ends where the document does."""
    tokens = volume.tokens_per_pack(pack_tokens)
    documents = tokens / volume.mean_tokens
    stretches = documents * volume.runs
    length = volume.mean_tokens * volume.supervised / volume.runs  # of one stretch
    candidates = [stretches * max(0.0, length - 1 - k) for k in range(drafter.depth)]
    reach = volume.typical_tokens * (1 - volume.supervised / 2)  # where in its document a trained row lies, on average
    anchors = 0.0
    if isinstance(drafter, DFlash):
        anchors = min(drafter.config.anchors, candidates[0])
        rows = [anchors * c / candidates[0] if candidates[0] else 0.0 for c in candidates]
        once = _blocks_at_once(drafter, tokens)
        covered = tokens * min(1.0, once / max(anchors, 1.0))  # tokens that a chunk of blocks stretches over
        block = drafter.config.block_size
        pairs = [
            anchors * block * (min(tokens, min(reach, _window(drafter, i)) + covered) + block)
            for i in range(len(drafter.layers))
        ]
        # Blocks overlap where anchors lie close: a teacher row is shared by the drafts that predict from it.
        density = anchors / candidates[0] if candidates[0] else 0.0
        teacher = candidates[0] * (1 - (1 - density) ** drafter.depth)
    else:
        rows = candidates
        pairs = [r * min(tokens, reach + CHUNK_ROWS * tokens / r) if r else 0.0 for r in rows]
        teacher = rows[0] + stretches * (drafter.depth - 1) * bool(rows[-1])
    chunks = sum(rows) * drafter.draft_vocab_size / CHUNK_ELEMENTS
    return Work(
        tokens=tokens,
        rows=tuple(rows),
        teacher_rows=min(teacher, sum(rows)),
        chunk_rows=min(teacher + chunks, sum(rows)),
        all_pairs=tokens * min(tokens, volume.typical_tokens / 2 + CHUNK_ROWS),
        pairs=tuple(pairs),
        anchors=anchors,
    )


def _window(drafter: DFlash, layer: int) -> float:
    return drafter.config.sliding_window if drafter.layer_types[layer] == "sliding_attention" else float("inf")
