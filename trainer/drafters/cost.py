"""What a drafter costs: floating-point operations of a training pack, and bytes that its backward keeps.

A drafter states this itself, so that the planner, the benchmarks and the tests know no drafter by name. `Cost` is what
holds for a drafter that says nothing of its own; `rollout_cost` and `block_cost` are those of the two kinds that ship.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import nn

from .merged import CHUNK_ROWS

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


@dataclass(frozen=True)
class AttentionShape:
    """Of one layer: query heads, widths of a key and of a value. window: 0 for none."""

    heads: int
    key: int
    value: int
    window: int = 0


def matrix_elements(module: nn.Module, routed: float) -> int:
    """Elements of the matrices that one token is multiplied with. routed: the share of the experts that it is sent to."""
    total = 0.0
    for name, p in module.named_parameters():
        if p.dim() < 2 or name.endswith("bias"):
            continue
        total += p.numel() * (routed if is_routed(name, p) else 1.0)
    return round(total)


def is_routed(name: str, parameter: torch.Tensor) -> bool:
    """transformers keeps the experts of a layer in one tensor of three dimensions."""
    return parameter.dim() == 3 and ".experts." in f".{name}"


def routed_share(config) -> float:
    experts = next(
        (n for k in ("n_routed_experts", "num_experts", "num_local_experts") if (n := getattr(config, k, 0))), 0
    )
    return config.num_experts_per_tok / experts if experts else 1.0


def attention_shapes(config) -> tuple[AttentionShape, ...]:
    """One per decoder layer that attends over tokens. (Linear attention has no scores.)"""
    heads = config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or 0
    shapes = []
    for i, kind in enumerate(kinds):
        if kind == "linear_attention":
            continue
        size = layer_key(config, "head_dim", i) or config.hidden_size // heads
        key = getattr(config, "qk_head_dim", None) or size
        value = getattr(config, "v_head_dim", None) or size
        shapes.append(AttentionShape(heads, key, value, window if kind == "sliding_attention" else 0))
    return tuple(shapes)


def layer_key(config, key: str, layer: int) -> int | None:
    """A key of one layer; transformers refuses to give one in which layers differ (Gemma 4) for the whole."""
    try:
        return getattr(config, key, None)
    except RuntimeError:
        return getattr(config.per_layer_config[layer], key, None)


def elements(modules: Iterable[nn.Module]) -> int:
    return sum(matrix_elements(module, 1.0) for module in modules)


def chunk_pairs(rows: np.ndarray, starts: np.ndarray) -> int:
    """Rows go in chunks, each over the span of keys from its first row's document to its last row."""
    chunks = [rows[i : i + CHUNK_ROWS] for i in range(0, len(rows), CHUNK_ROWS)]
    return sum(len(c) * int(c[-1] - starts[c[0]] + 1) for c in chunks)


SAMPLE = 16  # rows that are run


class _Attention(torch.autograd.Function):
    """Keeps for the backward what the real ones do: all that it is given, and a merged output in float32."""

    @staticmethod
    def forward(ctx, merged: bool, *given: torch.Tensor):
        q, v = given[-3], given[-1]
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(*given, *([out.float()] if merged else []))
        return out

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("only what is kept is counted")


class Sketch:
    """In the place of an attention strategy. Called with [keys, values of a context,] q, k, v [, how they are scored]."""

    def __init__(self, merged: bool):
        self._merged = merged

    def __call__(self, *given):
        return _Attention.apply(self._merged, *[x for x in given if isinstance(x, torch.Tensor)])

    def narrow(self, rows) -> None: ...


def kept_bytes(module: torch.nn.Module, run: Callable[[], object], beside: Iterable[torch.Tensor] = ()) -> float:
    """What autograd keeps of `run`, every storage once; neither parameters nor tensors that exist `beside`."""
    own = {t.untyped_storage()._cdata for t in (*module.parameters(), *beside)}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return float(sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in own))


@dataclass(frozen=True)
class Expected:
    """What is known of the average pack before there are data. tokens: T. stretches: trained runs of tokens. candidates
    [K]: rows that a draft of each step could be trained at. reach: where in its document a trained row lies."""

    tokens: float
    stretches: float
    candidates: list[float]
    reach: float


class Cost:
    """The part of a drafter that states its cost. The defaults are those of a drafter without attention, each of whose
    matrices is multiplied with every draft once."""

    config: Any
    depth: int

    @classmethod
    def reference_config(cls, anchors: int) -> Any:
        """A config for a reference run on a target of four layers. anchors: blocks, of a drafter that has any."""
        tapped = any(f.name == "taps" for f in fields(cls.Config))
        return cls.Config(taps=[1, 2, 3]) if tapped else cls.Config()

    def layers_run(self) -> int:
        """How often some layer of the drafter is run in one training forward."""
        return (len(getattr(self, "layers", ())) or 1) * self.depth

    # ---- work

    def anchors_of(self, rows: Sequence[np.ndarray]) -> int:
        """How many blocks a pack has. rows [K]: those at which the drafts of each step count."""
        return 0

    def measured_pairs(self, rows: Sequence[np.ndarray], starts: np.ndarray) -> tuple[float, ...]:
        """Query-key pairs, see `Work.pairs`. starts [T]: where each row's document begins."""
        return (0,) * len(rows)

    def expected_work(self, pack: Expected) -> tuple[list[float], tuple[float, ...], float, float]:
        """(rows [K], pairs, teacher_rows, anchors) of `Work`, for the average pack."""
        rows = pack.candidates
        teacher = rows[0] + pack.stretches * (self.depth - 1) * bool(rows[-1])
        return rows, (0.0,) * len(rows), teacher, 0.0

    # ---- operations

    def body_flops(self, work: Work, recompute: bool) -> Flops:
        """Forward and backward of one pack, up to the states that the head reads."""
        head = getattr(self, "lm_head", None)
        body = matrix_elements(self, 1.0) - (matrix_elements(head, 1.0) if head is not None else 0)
        return Flops(TRAINED * body * work.drafts * (4 / 3 if recompute else 1))

    def head_width(self, width: int) -> int:
        """Of the states that the head is multiplied with. width: the target's."""
        return width

    def head_passes(self) -> int:
        """Multiplications with the head for each draft: logits, the gradient of its input and, if it is learnt, its own."""
        return 2 + self.learns_head()

    def learns_head(self) -> bool:
        return getattr(self, "lm_head", None) is not None

    # ---- memory

    def kept_per_row(self, width: int, dtype: str) -> tuple[float, float]:
        """Bytes that autograd keeps (for each row of the pack, for each row that drafts). Here: what goes into each
        matrix and what comes out of it."""
        kept = sum(sum(p.shape) for p in self.parameters() if p.dim() == 2)
        return 0.0, float(kept * getattr(torch, dtype).itemsize)

    def activations(self, work: Work, kept: tuple[float, float], state: float, recompute: bool) -> tuple[float, float]:
        """(bytes kept for the backward, bytes recomputed there at once). kept: `kept_per_row`. state: of a hidden state."""
        everything = kept[0] * work.tokens + kept[1] * work.drafts
        return (work.drafts * state, everything / self.depth) if recompute else (everything, 0.0)

    def score_elements(self, work: Work) -> float:
        """Attention scores held while one chunk of rows is computed."""
        return 0.0
