"""Bytes that a trainer rank and a producer take, part by part.

What a drafter's layers keep for the backward is not a formula: its layers are run on the meta device, and what autograd keeps
of a row is added up. Letters: T tokens of a pack, A taps, H width, D draft vocabulary, N drafts of a pack, K steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace

import torch

from data_pipelines.features import FeatureSpec, payload_bytes
from trainer.config import RunConfig
from trainer.drafters import Drafter
from trainer.drafters.blocks import CHUNK_SCORES
from trainer.drafters.dflash import DFlash
from trainer.drafters.dspark import DSpark
from trainer.drafters.merged import CHUNK_ROWS
from trainer.losses import CHUNK_ELEMENTS

from .assumptions import Assumption
from .hardware import Hardware
from .shapes import TargetShape, layer_key
from .work import Work

PROCESS = Assumption(
    "bytes of a process before it holds anything: interpreter, torch, transformers, the store's client",
    0.9e9,
    "measured here: a rank's resident memory on a target of next to nothing (docs/scale.md)",
)
CONTEXT = Assumption(
    "bytes of GPU memory for the CUDA context, communication buffers and what the allocator cannot use",
    3.0e9,
    "a convention: 0.5 to 1 GB of context, as much for NCCL, the rest fragments",
)
LOSS_BLOCKS = Assumption(
    "blocks of [chunk, draft vocabulary] in float32 that the loss holds at once",
    10,
    "measured: 7 (cross entropy) to 10 (soft cross entropy), tests/launch/planner/test_memory.py",
)
SCORE_BLOCKS = Assumption("blocks of attention scores in float32 held at once", 4, "counted in merged.py and blocks.py")
TARGET_STATES = Assumption(
    "hidden states of width H (and half as many of the MLP's width) that one decoder layer's forward holds at once",
    8,
    "counted in transformers' Llama layer: residual, norm, q, k, v, output, and gate, up and their product",
)


def rank_memory(
    config: RunConfig,
    drafter: Drafter,
    target: TargetShape,
    work: Work,
    kept: tuple[float, float],
    *,
    ranks: int,
    machines: int,
    dtype: str,
) -> dict[str, float]:
    """Of the device of one rank, without what a process has anyway. kept: `kept_per_row`. dtype: of the computation."""
    b = getattr(torch, dtype).itemsize
    parallel, H, T = config.parallel, target.hidden, work.tokens / config.parallel.context
    packs = config.global_batch * parallel.context // ranks
    taps = len(getattr(drafter, "taps", ()))
    gathered, share = _gathered(drafter), T / work.tokens
    activations, again = (
        share * size for size in _activations(drafter, work, kept, target.hidden * b, parallel.recompute)
    )
    parts = {
        "frozen embedding, norm and head": target.outside * b,
        **({} if parallel.cpu_offload else _states(drafter, parallel, ranks, machines)),
        "drafter's weights gathered, their gradients": gathered * (2 * b + 4) * (ranks > 1) or gathered * b * (b < 4),
        "packs of one step": packs * (T * (taps + 1) * H * b + work.tokens * 25 + T * (H * b + 12)),
        "activations": activations,
        "loss": _loss(drafter, work, target, b) * share,
        "the busiest moment": max(again, _loss_blocks(drafter, work), _scores(drafter, work)),
    }
    if drafter.kept is not None:
        parts["head of the draft vocabulary"] = drafter.draft_vocab_size * H * b
    return parts


def rank_host_memory(
    config: RunConfig,
    drafter: Drafter,
    target: TargetShape,
    pack_tokens: float,
    dtype: str,
    *,
    ranks: int,
    machines: int,
) -> dict[str, float]:
    """Of the host, for one rank: prefetched packs (see `consumer.Prefetcher`), the store's buffers, what is offloaded."""
    taps = getattr(drafter, "taps", ())
    pack = payload_bytes(FeatureSpec("", tuple(taps), target.hidden, dtype), int(pack_tokens))
    parts = {"process": PROCESS.value, "prefetched packs": (config.source.prefetch + 1) * pack}
    if config.parallel.cpu_offload:
        parts |= _states(drafter, config.parallel, ranks, machines)
    if config.has_store:
        parts["store's buffers"] = config.store.buffer_bytes + 2 ** (pack - 1).bit_length()
    return parts


def producer_memory(target: TargetShape, taps: int, pack_tokens: float, devices: int, dtype: str) -> dict[str, float]:
    """Of one device of a producer. Only prefill: there is no cache of keys and values."""
    b = getattr(torch, dtype).itemsize
    inner = max(getattr(target.config, "intermediate_size", 0) or 0, _routed_width(target.config))
    return {
        "target's weights": target.stored_bytes / devices,
        "target's activations": pack_tokens
        * b
        * (TARGET_STATES.value * target.hidden + TARGET_STATES.value / 2 * inner / devices),
        "mask": pack_tokens**2,
        "taps and final state": pack_tokens * (taps + 1) * target.hidden * b,
    }


def producer_host_memory(
    config: RunConfig, target: TargetShape, taps: int, pack_tokens: float, dtype: str
) -> dict[str, float]:
    pack = payload_bytes(FeatureSpec("", tuple(range(taps)), target.hidden, dtype), int(pack_tokens))
    parts = {"process": PROCESS.value, "packs on their way out": 2 * pack}
    if config.has_store:
        parts["store's segment"] = config.store.segment_bytes
        parts["store's buffers"] = config.store.buffer_bytes
    return parts


def context_bytes(hardware: Hardware) -> float:
    """What a device has no use of."""
    return 0.0 if hardware.host else CONTEXT.value


def _routed_width(config) -> int:
    return (getattr(config, "moe_intermediate_size", 0) or 0) * (getattr(config, "num_experts_per_tok", 0) or 0)


def _states(drafter: Drafter, parallel, ranks: int, machines: int) -> dict[str, float]:
    """Bytes of what a rank trains, in float32."""
    trained, shards = sum(p.numel() for p in drafter.parameters()), _shards(parallel, ranks, machines)
    sizes = {"weights": 4, "gradients": 4, "moments": 8}
    return {f"drafter's {name}": trained * size / shards[name] for name, size in sizes.items()}


def _shards(parallel, ranks: int, machines: int) -> dict[str, int]:
    whole = dict.fromkeys(("weights", "gradients", "moments"), 1)
    if parallel.name == "ddp":
        return whole
    if parallel.name == "deepspeed":  # masters go with the moments
        sharded = {1: ("moments", "weights"), 2: ("moments", "weights", "gradients"), 3: tuple(whole)}[
            parallel.zero_stage
        ]
        return {**whole, **dict.fromkeys(sharded, ranks)}
    shards = ranks // (parallel.replicas or machines) if parallel.name == "hsdp" else ranks
    return dict.fromkeys(whole, max(1, shards))


def _gathered(drafter: Drafter) -> int:
    """Parameters that are whole at once: those that are no unit of their own, and two units (one is fetched ahead)."""
    units = [sum(p.numel() for p in unit.parameters()) for unit in drafter.shard_units()]
    return sum(p.numel() for p in drafter.parameters()) - sum(units) + sum(sorted(units)[-2:])


def _scores(drafter: Drafter, work: Work) -> float:
    """Of attention, while one chunk of its rows is computed."""
    if isinstance(drafter, DFlash):
        heads, pairs = drafter.layer_config.num_attention_heads, max(work.pairs, default=0.0)
        elements = min(CHUNK_SCORES, heads * pairs)
    else:
        heads = (getattr(drafter, "layer_config", None) or drafter.target_config).num_attention_heads
        span = max((p / r for p, r in zip(work.pairs, work.rows, strict=True) if r), default=0.0)
        elements = heads * CHUNK_ROWS * span
    return SCORE_BLOCKS.value * 4 * elements


def _loss_blocks(drafter: Drafter, work: Work) -> float:
    return LOSS_BLOCKS.value * 4 * min(CHUNK_ELEMENTS, work.drafts * drafter.draft_vocab_size)


def _loss(drafter: Drafter, work: Work, target: TargetShape, b: int) -> float:
    """What the loss keeps: states, sorted and not, their gradients, a judgement of each draft; of a head that is learnt, its
    gradient."""
    size, width, learnt = drafter.draft_vocab_size, target.hidden, getattr(drafter, "lm_head", None) is not None
    if isinstance(drafter, DSpark) and drafter.markov_head is not None:
        width, learnt = width + drafter.markov_head.rank, True
    return (size * width * (4 + 2 * b) if learnt else 0.0) + work.drafts * (3 * width * b + 60)


def _activations(
    drafter: Drafter, work: Work, kept: tuple[float, float], state: float, recompute: bool
) -> tuple[float, float]:
    """(what is kept for the backward, what is made again there at once). state: bytes of one hidden state."""
    whole, queried = kept
    first, rest = whole * work.tokens, sum(work.rows[1:])
    if isinstance(drafter, DFlash):
        slots = work.anchors * drafter.config.block_size
        everything = first + queried * slots
        if not recompute:
            return everything, 0.0
        layers = len(drafter.layers)
        return (layers + 1) * slots * state + work.tokens * 2 * state, everything / layers
    if getattr(drafter.config, "form", "") == "chained" or getattr(drafter.config, "attention", "") == "own_step":
        return (drafter.depth * work.tokens * state, first) if recompute else (drafter.depth * first, 0.0)
    shape = getattr(drafter, "layer_config", None) or drafter.target_config
    last = shape.num_hidden_layers - 1
    heads = layer_key(shape, "num_key_value_heads", last) or shape.num_attention_heads
    size = layer_key(shape, "head_dim", last) or shape.hidden_size // shape.num_attention_heads
    made = drafter.attending * 2 * heads * size * state / shape.hidden_size  # keys and values of a row
    # Each step keeps the keys and values of the steps before it, cut to its own rows.
    diagonals = made * sum(max(0, k - 1) * r for k, r in enumerate(work.rows))
    queries, later = (work.rows[0], whole + queried) if _narrows(drafter) else (0.0, queried)
    if not recompute:
        return first + queried * queries + later * rest + diagonals, 0.0
    again = max(first + queried * queries, (later + made * (drafter.depth - 1)) * max(work.rows[1:], default=0.0))
    return (work.tokens + rest) * (3 * state + made), again


def _narrows(drafter: Drafter) -> bool:
    """Whether its first step runs only the rows that count, beyond their keys."""
    return drafter.config.name == "eagle3"


_SAMPLE = 16  # rows that are run


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


class _Sketch:
    """In the place of an attention strategy. Called with [keys, values of a context,] q, k, v [, how they are scored]."""

    def __init__(self, merged: bool):
        self._merged = merged

    def __call__(self, *given):
        return _Attention.apply(self._merged, *[x for x in given if isinstance(x, torch.Tensor)])

    def narrow(self, rows) -> None: ...


def kept_per_row(drafter: Drafter, target: TargetShape, dtype: str) -> tuple[float, float]:
    """Bytes that autograd keeps (for each row of the pack, for each row that is a query) of the first step; queries of blocks
    are their slots. In a later step every row is both. The pack's own features are not counted."""
    drafter = drafter.to(getattr(torch, dtype))
    n = _SAMPLE

    def states(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, target.hidden, device="meta", dtype=getattr(torch, dtype))

    frozen = SimpleNamespace(embed=lambda tokens: states(*tokens.shape), normed=lambda final: final)
    index = torch.empty(n, dtype=torch.long, device="meta")
    taps, final = states(n, len(getattr(drafter, "taps", ()))), states(n)
    features = (taps, final)
    with torch.device("meta"):
        if isinstance(drafter, DFlash):
            block = drafter.config.block_size

            def blocks(anchors: int) -> None:
                where = index.new_empty(anchors)
                sketches = [_Sketch(False) for _ in drafter.layers]
                drafter.run_blocks(where, where, taps, index, sketches, frozen)

            one, two = (kept_bytes(drafter, lambda k=k: blocks(k * n), features) for k in (1, 2))
            queried = (two - one) / (n * block)
            return one / n - queried * block, queried

        def step(rows: torch.Tensor | None) -> None:
            sketches = [_Sketch(True) for _ in range(drafter.attending)]
            hidden = drafter.start(taps, final, frozen)
            drafter.normed(drafter.run_layers(states(n), hidden, index, sketches, rows))

        if not _narrows(drafter):
            each = kept_bytes(drafter, lambda: step(None), features) / n
            return each, each
        whole, half = (kept_bytes(drafter, lambda k=k: step(index[: n // k]), features) for k in (1, 2))
        queried = (whole - half) / (n // 2)
        return whole / n - queried, queried


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
