"""A job and the number of its roles → a plan, with the split that would finish soonest, and everything that it assumes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainer.config import RunConfig

from . import hardware as machines
from . import memory
from .assumptions import Assumption
from .job import OPTIMIZER_BYTES, REQUESTS, Job, make_job
from .volume import FILL, Volume


@dataclass
class Plan:
    """What `draftsmith plan` says; `--json` prints it as it is."""

    recipe: str
    target: dict[str, Any]
    drafter: dict[str, Any]
    data: dict[str, Any]
    hardware: dict[str, Any]
    roles: dict[str, Any]
    inference: dict[str, float]
    training: dict[str, float]
    features: dict[str, float]
    links: dict[str, float]
    ledger: dict[str, float]
    window: dict[str, float]
    memory: dict[str, dict[str, float]]
    phases: list[dict[str, Any]]
    limits: dict[str, float]
    bottleneck: str
    tokens_per_second: float
    seconds: float
    device_hours: float
    cost: float | None
    balance: dict[str, Any]
    assumptions: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)


def recommend(job: Job) -> dict[str, Any] | None:
    """How many producers and ranks of all devices finish soonest, and of those with the fewest device-hours; None when no
    split fits. Ranks must divide global_batch."""
    budget, best = job.hardware.devices, None
    context, groups = job.config.parallel.context, job.config.global_batch
    for ranks in range(context, budget + 1, context):
        if groups % (ranks // context):
            continue
        if job.source == "colocated":
            options = [0]
        elif job.hardware.host:
            options = [budget]
        else:
            taken = 0 if job.source == "offline" else ranks  # captures have ended when ranks begin
            options = range(1, (budget - taken) // job.devices_per_producer + 1)
        for producers in options:
            if job.streamed and job.window_packs(producers, ranks) < 1:
                continue
            if job.fits(producers, ranks):
                continue
            phases = job.phases(producers, ranks)
            seconds, hours = sum(p.seconds for p in phases), sum(p.device_hours for p in phases)
            if best is None or (seconds, hours) < (best["seconds"], best["device_hours"]):
                best = {"producers": producers, "ranks": ranks, "seconds": seconds, "device_hours": hours}
    if best is not None:
        best["tokens_per_second"] = job.total_tokens / best["seconds"]
    return best


def make_plan(config: RunConfig, volume: Volume) -> Plan:
    """Raises UserError, see `make_job` and `Job.phases`."""
    job = make_job(config, volume)
    ranks = config.cluster.ranks
    producers = 0 if job.source == "colocated" else config.cluster.producers
    hardware = job.hardware
    phases = job.phases(producers, ranks)
    seconds = sum(phase.seconds for phase in phases)
    longest = max(phases, key=lambda phase: phase.seconds)
    rate = job.total_tokens / seconds
    devices = max(phase.devices for phase in phases)
    tokens, packs = job.work.tokens, volume.packs(config.data.pack_tokens)
    wire = rate * job.bytes_per_token if job.streamed else 0.0
    hours = sum(phase.device_hours for phase in phases)
    inference_rate = tokens / (job.producer_seconds + job.put_seconds)
    training_rate = tokens / job.rank_seconds(ranks) / config.parallel.context
    trained = sum(p.numel() for p in job.drafter.parameters())
    return Plan(
        recipe=config.recipe,
        target={
            "name": job.target.name,
            "parameters": job.target.parameters,
            "active_parameters": job.target.active,
            "stored_bytes": job.target.stored_bytes,
            "source": job.target.source,
        },
        drafter={
            "name": config.drafter.name,
            "parameters": trained,
            "draft_vocabulary": job.drafter.draft_vocab_size,
            "steps": job.drafter.depth,
        },
        data={
            "samples": volume.samples,
            "mean_tokens": volume.mean_tokens,
            "tokens": volume.tokens,
            "supervised_share": volume.supervised,
            "epochs": config.epochs,
            "pack_tokens": config.data.pack_tokens,
            "tokens_per_pack": tokens,
            "packs": packs,
            "global_batch": config.global_batch,
            "steps": job.steps,
            "trained_tokens": job.total_tokens,
            "drafts_per_pack": job.work.drafts,
            "measured": volume.measured,
        },
        hardware=asdict(hardware),
        roles={
            "source": job.source,
            "producers": producers,
            "ranks": ranks,
            "devices_per_producer": job.devices_per_producer,
            "devices": devices,
            "feature_dtype": job.feature_dtype,
            "compute_dtype": job.compute_dtype,
        },
        inference={
            "flops_per_token": job.inference.total / tokens,
            "seconds_per_pack": job.producer_seconds,
            "put_seconds_per_pack": job.put_seconds,
            "tokens_per_second_per_producer": inference_rate,
            "tokens_per_second": inference_rate * producers,
        },
        training={
            "flops_per_token": job.training.total / tokens,
            "attention_share": job.training.attention / job.training.total,
            "seconds_per_pack": job.rank_seconds(ranks),
            "tokens_per_second_per_rank": training_rate,
            "tokens_per_second": training_rate * ranks,
        },
        features={
            "bytes_per_token": job.bytes_per_token,
            "bytes_per_pack": job.pack_bytes,
            "bytes_per_epoch": job.bytes_per_token * volume.tokens,
        },
        links={
            "stream": wire,
            "out_of_each_inference_node": wire / job.nodes_for(max(1, producers) * job.devices_per_producer),
            "into_each_trainer_node": wire / job.nodes_for(ranks),
            "into_each_rank": wire / ranks,
        },
        ledger={
            "requests_per_pack": REQUESTS.value,
            "requests_per_second": rate / tokens * REQUESTS.value if job.streamed else 0.0,
        },
        window={
            "packs": job.window_packs(producers, ranks),
            "bytes": job.window_packs(producers, ranks) * job.pack_bytes,
            "needed_packs": math.ceil(rate / tokens * job.under_way_seconds),
        }
        if job.streamed
        else {},
        memory=job.memory(producers, ranks),
        phases=[
            {
                "name": phase.name,
                "tokens": phase.tokens,
                "seconds": phase.seconds,
                "device_hours": phase.device_hours,
                "tokens_per_second": phase.tokens_per_second,
                "bottleneck": phase.bottleneck,
            }
            for phase in phases
        ],
        limits=longest.limits,
        bottleneck=longest.bottleneck,
        tokens_per_second=rate,
        seconds=seconds,
        device_hours=hours,
        cost=hours * hardware.price_per_hour if hardware.price_per_hour else None,
        balance={
            "ranks_per_producer": inference_rate / training_rate,
            "recommended": recommend(job),
        },
        assumptions=[asdict(a) for a in assumptions(job)],
        notes=notes(job, producers, ranks),
    )


def assumptions(job: Job) -> list[Assumption]:
    """Those that this plan stands on; what was measured is not among them."""
    hardware, given = job.hardware, job.config.cluster.hardware
    found = [FILL] if job.volume.spread else []
    for key, kind, assumed in (
        ("inference_mfu", "inference", machines.INFERENCE_MFU),
        ("training_mfu", job.config.drafter.name, machines.TRAINING_MFU),
    ):
        if value := getattr(given, key):
            found.append(replace(assumed, value=value, source=f"given: cluster.hardware.{key}"))
        elif not hardware.measured(kind):
            found.append(assumed)
    if given.link_bytes_per_second:
        what = "bytes a second of a node's network, each way"
        found.append(Assumption(what, given.link_bytes_per_second, "given: cluster.hardware.link_bytes_per_second"))
    used = {"store_put": machines.PUT_RATE, "store_get": machines.GET_RATE} if job.streamed else {}
    if job.source in ("offline", "hybrid"):
        used["disk"] = machines.DISK_RATE
    found += [a for key, a in used.items() if getattr(hardware, f"{key}_bytes_per_second") == a.value]
    if job.streamed and hardware.ledger_requests_per_second == machines.LEDGER_RATE.value:
        found.append(machines.LEDGER_RATE)
    if not hardware.host:
        found.append(memory.CONTEXT)
    found += [machines.LINK_SHARE, REQUESTS, OPTIMIZER_BYTES, memory.PROCESS, memory.LOSS_BLOCKS, memory.SCORE_BLOCKS]
    found.append(memory.TARGET_STATES)
    if not job.volume.measured:
        found.append(
            Assumption(
                "standard deviation of the documents' lengths, in means", job.volume.spread, "a guess; measure it"
            )
        )
        found.append(
            Assumption(
                "share of the tokens that is trained on", job.volume.supervised, "given, or a guess; --supervised"
            )
        )
    return found


def notes(job: Job, producers: int, ranks: int) -> list[str]:
    """What a person should know beside the numbers."""
    found = job.fits(producers, ranks)
    phases, has = job.phases(producers, ranks), job.hardware.devices
    if (used := max(phase.devices for phase in phases)) > has:
        found.append(
            f"{producers} producers of {job.devices_per_producer} and {ranks} ranks take {used} devices; cluster.hardware "
            f"has {has}"
        )
    if job.devices_per_producer > 1:
        found.append(
            f"one copy of the target is spread over {job.devices_per_producer} devices; this project's transformers engine "
            "uses one device, so that such a producer needs an engine with tensor parallelism"
        )
    held_up = [phase.bottleneck for phase in phases]
    if "window" in held_up:
        found.append("the window holds the stream up: raise source.prefetch, or store.segment_bytes")
    if "prefetch" in held_up:
        packs = job.packs_per_rank(ranks)
        found.append(
            f"a rank takes the {packs:.0f} packs of a step before it computes any, and meanwhile only "
            f"source.prefetch={job.config.source.prefetch} are made ready, then producers wait: source.prefetch={packs:.0f}"
        )
    longest = job.config.data.max_document_tokens
    if job.volume.mean_tokens > longest:
        found.append(f"documents are longer than data.max_document_tokens={longest:,} on average: most would be cut")
    return found
