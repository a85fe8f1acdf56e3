"""Bytes that a trainer rank and a producer take, part by part.

What a drafter's layers keep for the backward is not a formula: its layers are run on the meta device, and what autograd keeps
of a row is added up. Letters: T tokens of a pack, A taps, H width, D draft vocabulary, N drafts of a pack, K steps.
"""

from __future__ import annotations

import torch

from data_pipelines.features import FeatureSpec, payload_bytes
from trainer.config import RunConfig
from trainer.drafters import Drafter
from trainer.drafters.cost import Work
from trainer.losses import CHUNK_ELEMENTS

from .assumptions import Assumption
from .hardware import Hardware
from .shapes import TargetShape

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
    """Of the device of one rank, without what a process has anyway. kept: the drafter's `kept_per_row`. dtype: of the
    computation."""
    b = getattr(torch, dtype).itemsize
    parallel, H, T = config.parallel, target.hidden, work.tokens / config.parallel.context
    packs = config.global_batch * parallel.context // ranks
    taps = len(getattr(drafter, "taps", ()))
    gathered, share = _gathered(drafter), T / work.tokens
    activations, again = (
        share * size for size in drafter.activations(work, kept, target.hidden * b, parallel.recompute)
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
    return SCORE_BLOCKS.value * 4 * drafter.score_elements(work)


def _loss_blocks(drafter: Drafter, work: Work) -> float:
    return LOSS_BLOCKS.value * 4 * min(CHUNK_ELEMENTS, work.drafts * drafter.draft_vocab_size)


def _loss(drafter: Drafter, work: Work, target: TargetShape, b: int) -> float:
    """What the loss keeps: states, sorted and not, their gradients, a judgement of each draft; of a head that is learnt, its
    gradient."""
    size, width = drafter.draft_vocab_size, drafter.head_width(target.hidden)
    return (size * width * (4 + 2 * b) if drafter.learns_head() else 0.0) + work.drafts * (3 * width * b + 60)
