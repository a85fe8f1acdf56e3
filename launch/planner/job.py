"""One recipe on one kind of machine, counted once: what a pack costs at each station, whatever the number of roles.

A run is a chain of stations, and the slowest gives its speed: producers (the target's prefill), ranks (the drafter's
training), the links and the store between them, the ledger, the window. Where processes share the cores of one machine, the
cores are a station too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from data_pipelines.errors import UserError
from data_pipelines.features import FeatureSpec, payload_bytes
from trainer.config import RunConfig
from trainer.drafters import DRAFTERS, Drafter
from trainer.drafters.cost import Flops, Work

from . import memory
from .assumptions import Assumption
from .flops import target_flops, training_flops
from .hardware import LINK_SHARE, PACK_CALLS, Hardware, ledger_seconds, resolve_hardware
from .shapes import TargetShape, draft_shape, target_shape
from .volume import Volume
from .work import expected_work

REQUESTS = Assumption("requests to the ledger for a pack", len(PACK_CALLS), ", ".join(PACK_CALLS))
OPTIMIZER_BYTES = Assumption(
    "bytes that an optimizer step moves for each parameter of a shard",
    36,
    "float32: weight, gradient and two moments read, all but the gradient written; the gradient read for its norm and scaled",
)
WINDOW_SHARE = 0.9  # of what producers lend: data_pipelines/stream/window.py


@dataclass(frozen=True)
class Phase:
    """A stretch of the run with one bound. limits: tokens a second that each station lets through. devices: those at work."""

    name: str
    tokens: float
    limits: dict[str, float]
    devices: int

    @property
    def bottleneck(self) -> str:
        return min(self.limits, key=self.limits.__getitem__)

    @property
    def tokens_per_second(self) -> float:
        return self.limits[self.bottleneck]

    @property
    def seconds(self) -> float:
        return self.tokens / self.tokens_per_second

    @property
    def device_hours(self) -> float:
        return self.devices * self.seconds / 3600


@dataclass(frozen=True, eq=False)
class Job:
    """What a plan is made of, counted once: one recipe on one kind of machine, whatever the number of its roles."""

    config: RunConfig
    target: TargetShape
    drafter: Drafter
    work: Work
    volume: Volume
    hardware: Hardware
    devices_per_producer: int
    feature_dtype: str
    compute_dtype: str
    pack_bytes: int
    inference: Flops
    training: Flops

    @property
    def source(self) -> str:
        return self.config.source.name

    @property
    def streamed(self) -> bool:
        return self.config.source.streams

    @cached_property
    def kept(self) -> tuple[float, float]:
        return self.drafter.kept_per_row(self.target.hidden, self.compute_dtype)

    @property
    def taps(self) -> int:
        return len(getattr(self.drafter, "taps", ()))

    @property
    def bytes_per_token(self) -> float:
        return self.pack_bytes / self.work.tokens

    @property
    def producer_seconds(self) -> float:
        """For a pack's forward, on the devices of one producer."""
        hardware, flops = self.hardware, self.inference
        rate = hardware.flops(self.feature_dtype) * hardware.efficiency("inference") * self.devices_per_producer
        overhead = hardware.overhead_seconds.get("inference", 0.0) * self.target.config.num_hidden_layers
        return flops.total / rate + overhead

    @property
    def put_seconds(self) -> float:
        """Of a producer for a pack, beside the forward: it encodes and puts when that is done, and calls the ledger twice."""
        costs = self.hardware.costs
        return costs.put + self.pack_bytes * costs.put_byte + 2 * costs.caller if self.streamed else 0.0

    @property
    def get_seconds(self) -> float:
        """Of a rank's prefetching thread for a pack: three calls, the transfer, copying and verifying, the removal."""
        costs, rate = self.hardware.costs, self.hardware.store_get_bytes_per_second
        return costs.get + costs.remove + self.pack_bytes * (1 / rate + costs.get_byte) + 3 * costs.caller

    @property
    def batch_seconds(self) -> float:
        """For a pack's forward and backward on one rank."""
        hardware, kind = self.hardware, self.config.drafter.name
        share = hardware.efficiency(kind)
        matmul = self.training.matmul / (hardware.flops(self.compute_dtype) * share)
        attention = self.training.attention / (hardware.fp32_flops * share)
        overhead = hardware.overhead_seconds.get(kind, 0.0) * self.drafter.layers_run()
        return (matmul + attention) / self.config.parallel.context + overhead

    def rank_seconds(self, ranks: int) -> float:
        """For a pack on one rank, with its part of the step's collectives and of the optimizer."""
        packs = self.packs_per_rank(ranks)
        parameters = sum(p.numel() for p in self.drafter.parameters())
        wire = 0.0
        if ranks > 1:  # weights gathered for forward and backward of every pack, gradients reduced once a step
            weight = 2 if self.compute_dtype == "bfloat16" else 4
            gathers = 0 if self.config.parallel.name in ("ddp", "deepspeed") else 2
            wire = parameters * (gathers * weight + 4 / packs) * (ranks - 1) / ranks / self.ring_rate(ranks)
        shards = 1 if self.config.parallel.name == "ddp" else ranks
        optimizer = parameters * OPTIMIZER_BYTES.value / shards / self.hardware.memory_bytes_per_second / packs
        return self.batch_seconds + wire + optimizer + self.hardware.step_seconds / packs

    def ring_rate(self, ranks: int) -> float:
        """Bytes a second between neighbours of the ranks' ring: inside a node, or across its network."""
        hardware = self.hardware
        if ranks <= hardware.devices_per_node:
            return hardware.peer_bytes_per_second * LINK_SHARE.value
        return hardware.link_bytes_per_second * LINK_SHARE.value

    def limits(self, producers: int, ranks: int) -> dict[str, float]:
        """Tokens a second that each station of the stream lets through."""
        hardware, tokens, size = self.hardware, self.work.tokens, self.bytes_per_token
        groups = ranks / self.config.parallel.context
        limits = {
            "inference": producers * tokens / (self.producer_seconds + self.put_seconds),
            "store reads": groups * tokens / self.get_seconds,
            "ledger": tokens / ledger_seconds(hardware.costs, tokens),
            "window": self.window_packs(producers, ranks) * tokens / self.under_way_seconds,
        }
        if not self.one_node(producers, ranks):
            link = hardware.link_bytes_per_second * LINK_SHARE.value / size
            limits["network of the inference nodes"] = link * self.nodes_for(producers * self.devices_per_producer)
            limits["network of the trainer nodes"] = link * self.nodes_for(ranks)
        if hardware.host:
            seconds = (
                self.producer_seconds * self.devices_per_producer
                + self.rank_seconds(ranks) * self.config.parallel.context
                + self.put_seconds
                + self.get_seconds
            )
            limits["cores"] = hardware.devices * tokens / seconds
        # A rank takes all packs of a step before it computes any, and while it computes only `prefetch` are made ready.
        packs, ahead, supply = self.packs_per_rank(ranks), self.config.source.prefetch, min(limits.values()) / groups
        training = packs * self.rank_seconds(ranks)
        if ahead < packs and training * supply > ahead * tokens:
            limits["prefetch"] = groups * packs * tokens / (training + (packs - ahead) * tokens / supply)
        return {**limits, "training": groups * tokens / self.rank_seconds(ranks)}

    def packs_per_rank(self, ranks: int) -> float:
        """In a step."""
        return self.config.global_batch * self.config.parallel.context / ranks

    @property
    def under_way_seconds(self) -> float:
        """From a pack's lease to its last byte on the rank."""
        return self.producer_seconds + self.put_seconds + self.get_seconds

    def one_node(self, producers: int, ranks: int) -> bool:
        return producers * self.devices_per_producer + ranks <= self.hardware.devices_per_node or self.hardware.host

    def nodes_for(self, devices: int) -> int:
        return math.ceil(devices / self.hardware.devices_per_node)

    def window_packs(self, producers: int, ranks: int) -> float:
        """Packs that may be under way: by number, and by the bytes that producers lend."""
        source, lent = self.config.source, producers * self.config.store.segment_bytes
        by_number = ranks / self.config.parallel.context * source.prefetch
        room = source.window_bytes or WINDOW_SHARE * lent
        return min(by_number, room // self.pack_bytes if self.config.store.name == "mooncake" else by_number)

    def phases(self, producers: int, ranks: int) -> list[Phase]:
        """Raises UserError when a pack is larger than the window: nothing would ever move."""
        epoch, epochs = self.volume.tokens, self.config.epochs
        total, inferring, training = self.total_tokens, producers * self.devices_per_producer, ranks
        if self.hardware.host:
            inferring = training = both = self.hardware.devices
        else:
            both = inferring + training
        trained = {"training": ranks / self.config.parallel.context * self.work.tokens / self.rank_seconds(ranks)}
        if self.hardware.host:
            trained["cores"] = self.hardware.devices * self.work.tokens / self.rank_seconds(ranks)
        read = {"disk": self.hardware.disk_bytes_per_second / self.bytes_per_token}
        inferred = {"inference": producers * self.work.tokens / self.producer_seconds}
        if self.hardware.host:
            inferred["cores"] = self.hardware.devices * self.work.tokens / self.producer_seconds
        if self.source == "colocated":
            seconds = self.producer_seconds * self.devices_per_producer + self.rank_seconds(ranks)
            limits = {"inference and training on one device": ranks * self.work.tokens / seconds}
            if self.hardware.host:
                limits["cores"] = self.hardware.devices * self.work.tokens / seconds
            return [Phase("colocated", total, limits, training)]
        if self.source == "offline":  # one after the other, on the same devices
            capture = Phase("capture", epoch, {**inferred, **read}, inferring)
            return [capture, Phase("training", total, {**trained, **read}, training)]
        streamed = self.limits(producers, ranks)
        if streamed["window"] <= 0:
            raise UserError(
                f"a pack takes {self.pack_bytes:,} bytes, more than the window",
                fix="raise store.segment_bytes (or source.window_bytes), or lower data.pack_tokens",
            )
        if self.source == "stream" or epochs == 1:
            return [Phase("streamed", total, streamed, both)]
        kept = min(1.0, self.config.source.cache_bytes / (epoch * self.bytes_per_token))
        first = min(epoch, total)
        again = Phase("streamed", first + (total - first) * (1 - kept), streamed, both)
        return [again, Phase("from the cache", (total - first) * kept, {**trained, **read}, both)]

    @property
    def steps(self) -> int:
        packs = self.volume.packs(self.config.data.pack_tokens) * self.config.epochs
        steps = max(1, int(packs // self.config.global_batch))
        return min(steps, self.config.max_steps) if self.config.max_steps else steps

    @property
    def total_tokens(self) -> float:
        return min(self.steps * self.config.global_batch * self.work.tokens, self.volume.tokens * self.config.epochs)

    def seconds(self, producers: int, ranks: int) -> float:
        return sum(phase.seconds for phase in self.phases(producers, ranks))

    def memory(self, producers: int, ranks: int) -> dict[str, dict[str, float]]:
        tokens, spread = self.work.tokens, self.nodes_for(ranks)
        trained = memory.rank_memory(
            self.config,
            self.drafter,
            self.target,
            self.work,
            self.kept,
            ranks=ranks,
            machines=spread,
            dtype=self.compute_dtype,
        )
        computed = memory.producer_memory(self.target, self.taps, tokens, self.devices_per_producer, self.feature_dtype)
        if self.source == "colocated":
            trained.update(computed)
        unused = {"context": memory.context_bytes(self.hardware)} if not self.hardware.host else {}
        found = {
            "rank": {**trained, **unused},
            "rank_host": memory.rank_host_memory(
                self.config, self.drafter, self.target, tokens, self.feature_dtype, ranks=ranks, machines=spread
            ),
        }
        if producers:
            found["producer"] = {**computed, **unused}
            found["producer_host"] = memory.producer_host_memory(
                self.config, self.target, self.taps, tokens, self.feature_dtype
            )
        return found

    def fits(self, producers: int, ranks: int) -> list[str]:
        """What does not, in words."""
        found, problems = self.memory(producers, ranks), []
        for role in ("rank", "producer"):
            needed = sum(found.get(role, {}).values())
            if not self.hardware.host and needed > self.hardware.memory_bytes:
                worst = max(found[role], key=found[role].__getitem__)
                problems.append(
                    f"a {role} needs {needed / 1e9:,.0f} GB and a {self.hardware.name} has "
                    f"{self.hardware.memory_bytes / 1e9:,.0f}: mostly {worst} ({found[role][worst] / 1e9:,.0f} GB)"
                )
        needed, has = self.node_memory(found, producers, ranks), self.hardware.host_memory_bytes
        if needed > has:
            most = max((size, part) for role in found for part, size in found[role].items() if "host" in role)
            problems.append(
                f"a node needs {needed / 1e9:,.0f} GB of host memory and has {has / 1e9:,.0f}; the largest part of a "
                f"process is its {most[1]} ({most[0] / 1e9:,.0f} GB)"
            )
        return problems

    def node_memory(self, found: dict[str, dict[str, float]], producers: int, ranks: int) -> float:
        """Bytes of the host's memory that the fullest node needs. found: see `memory`."""
        one, node = self.one_node(producers, ranks), self.hardware.devices_per_node
        here = {
            "rank": ranks if one else min(ranks, node),
            "producer": producers if one else min(producers, max(1, node // self.devices_per_producer)),
        }
        kinds = ("", "_host") if self.hardware.host else ("_host",)
        needed = [n * sum(sum(found.get(role + kind, {}).values()) for kind in kinds) for role, n in here.items()]
        return sum(needed) if one and self.source != "offline" else max(needed)


def make_job(config: RunConfig, volume: Volume) -> Job:
    """Raises UserError for a target or hardware that nothing is known of, and for a target that no producer can hold."""
    hardware, target = resolve_hardware(config.cluster.hardware), target_shape(config.target)
    feature_dtype = hardware.native_dtype if config.target.dtype == "auto" else config.target.dtype
    asked = config.parallel.compute_dtype
    drafter = draft_shape(config.drafter, target)
    work = expected_work(drafter, volume, config.data.pack_tokens)
    contract = DRAFTERS[config.drafter.name].contract(config.drafter, target.config.num_hidden_layers)
    spec = FeatureSpec("", contract.taps, target.hidden, feature_dtype)
    spread = config.cluster.hardware.devices_per_producer or _fewest_devices(
        target, len(contract.taps), work.tokens, hardware, feature_dtype
    )
    return Job(
        config=config,
        target=target,
        drafter=drafter,
        work=work,
        volume=volume,
        hardware=hardware,
        devices_per_producer=spread,
        feature_dtype=feature_dtype,
        compute_dtype=hardware.native_dtype if asked == "auto" else asked,
        pack_bytes=payload_bytes(spec, round(work.tokens)),
        # The engine masks a whole pack; one that is spread over devices is a serving engine, which skips what is masked.
        inference=target_flops(target, work.tokens, work.tokens if spread == 1 else volume.typical_tokens / 2),
        training=training_flops(drafter, work, target, recompute=config.parallel.recompute),
    )


def _fewest_devices(target: TargetShape, taps: int, tokens: float, hardware: Hardware, dtype: str) -> int:
    for devices in (1, 2, 4, 8, 16, 32):
        needed = sum(memory.producer_memory(target, taps, tokens, devices, dtype).values())
        if hardware.host or needed + memory.context_bytes(hardware) <= hardware.memory_bytes:
            return devices
    raise UserError(
        f"{target.name} takes {target.stored_bytes / 1e9:,.0f} GB: 32 devices of {hardware.name} do not hold it",
        fix="cluster.hardware.device=<a larger one>, or cluster.hardware.devices_per_producer=64",
    )
