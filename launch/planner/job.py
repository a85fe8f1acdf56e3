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

from . import memory
from .assumptions import Assumption
from .flops import Flops, target_flops, training_flops
from .hardware import LINK_SHARE, Hardware, resolve_hardware
from .shapes import TargetShape, draft_shape, target_shape
from .volume import Volume
from .work import Work, expected_work

REQUESTS = Assumption(
    "requests to the ledger for a pack", 5, "want, lease, stored, locate, consumed (data_pipelines/stream/messages.py)"
)
OPTIMIZER_BYTES = Assumption(
    "bytes that an optimizer step moves for each parameter of a shard",
    36,
    "float32: weight, gradient and two moments read, all but the gradient written; the gradient read for its norm and scaled",
)
WINDOW_SHARE = 0.9  # of what producers lend: data_pipelines/stream/window.py


@dataclass(frozen=True)
class Phase:
    """A stretch of the run with one bound. limits: tokens a second that each station would let through."""

    name: str
    tokens: float
    limits: dict[str, float]

    @property
    def bottleneck(self) -> str:
        return min(self.limits, key=self.limits.__getitem__)

    @property
    def tokens_per_second(self) -> float:
        return self.limits[self.bottleneck]

    @property
    def seconds(self) -> float:
        return self.tokens / self.tokens_per_second


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

    @cached_property
    def kept(self) -> tuple[float, float]:
        return memory.kept_per_row(self.drafter, self.target, self.compute_dtype)

    @property
    def taps(self) -> int:
        return len(getattr(self.drafter, "taps", ()))

    @property
    def bytes_per_token(self) -> float:
        return self.pack_bytes / self.work.tokens

    @property
    def producer_seconds(self) -> float:
        """For a pack, on the devices of one producer."""
        hardware, flops = self.hardware, self.inference
        rate = hardware.flops(self.feature_dtype) * hardware.efficiency("inference") * self.devices_per_producer
        overhead = hardware.overhead_seconds.get("inference", 0.0) * self.target.config.num_hidden_layers
        return flops.total / rate + overhead

    @property
    def batch_seconds(self) -> float:
        """For a pack's forward and backward on one rank."""
        hardware, kind = self.hardware, self.config.drafter.name
        share = hardware.efficiency(kind)
        matmul = self.training.matmul / (hardware.flops(self.compute_dtype) * share)
        attention = self.training.attention / (hardware.fp32_flops * share)
        overhead = hardware.overhead_seconds.get(kind, 0.0) * layers_run(self.drafter)
        return (matmul + attention) / self.config.parallel.context + overhead

    def rank_seconds(self, ranks: int) -> float:
        """For a pack on one rank, with its part of the step's collectives and of the optimizer."""
        packs = self.config.global_batch * self.config.parallel.context / ranks
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
            "inference": producers * tokens / self.producer_seconds,
            "training": groups * tokens / self.rank_seconds(ranks),
            "store writes": producers * hardware.store_put_bytes_per_second / size,
            "store reads": groups * hardware.store_get_bytes_per_second / size,
            "ledger": hardware.ledger_requests_per_second / REQUESTS.value * tokens,
            "window": self.window_packs(producers, ranks) * tokens / (self.producer_seconds + self.transfer_seconds),
        }
        if not self.one_node(producers, ranks):
            link = hardware.link_bytes_per_second * LINK_SHARE.value / size
            limits["network of the inference nodes"] = link * self.nodes_for(producers * self.devices_per_producer)
            limits["network of the trainer nodes"] = link * self.nodes_for(ranks)
        if hardware.host:
            transport = 1 / hardware.store_put_bytes_per_second + 1 / hardware.store_get_bytes_per_second
            seconds = (
                self.producer_seconds * self.devices_per_producer
                + self.rank_seconds(ranks) * self.config.parallel.context
                + self.pack_bytes * transport
            )
            limits["cores"] = hardware.devices * tokens / seconds
        return limits

    @property
    def transfer_seconds(self) -> float:
        return self.pack_bytes * (
            1 / self.hardware.store_put_bytes_per_second + 1 / self.hardware.store_get_bytes_per_second
        )

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
        total = self.total_tokens
        trained = {"training": ranks / self.config.parallel.context * self.work.tokens / self.rank_seconds(ranks)}
        if self.hardware.host:
            trained["cores"] = self.hardware.devices * self.work.tokens / self.rank_seconds(ranks)
        read = {"disk": self.hardware.disk_bytes_per_second / self.bytes_per_token}
        inferred = {"inference": producers * self.work.tokens / self.producer_seconds}
        if self.hardware.host:
            inferred["cores"] = self.hardware.devices * self.work.tokens / self.producer_seconds
        if self.source == "colocated":
            both = self.producer_seconds * self.devices_per_producer + self.rank_seconds(ranks)
            limits = {"inference and training on one device": ranks * self.work.tokens / both}
            if self.hardware.host:
                limits["cores"] = self.hardware.devices * self.work.tokens / both
            return [Phase("colocated", total, limits)]
        if self.source == "offline":
            return [Phase("capture", epoch, {**inferred, **read}), Phase("training", total, {**trained, **read})]
        streamed = self.limits(producers, ranks)
        if streamed["window"] <= 0:
            raise UserError(
                f"a pack takes {self.pack_bytes:,} bytes, more than the window",
                fix="raise store.segment_bytes (or source.window_bytes), or lower data.pack_tokens",
            )
        if self.source == "stream" or epochs == 1:
            return [Phase("streamed", total, streamed)]
        kept = min(1.0, self.config.source.cache_bytes / (epoch * self.bytes_per_token))
        first = min(epoch, total)
        again = Phase("streamed", first + (total - first) * (1 - kept), streamed)
        return [again, Phase("from the cache", (total - first) * kept, {**trained, **read})]

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
            "rank_host": memory.rank_host_memory(self.config, self.target, self.taps, tokens, self.feature_dtype),
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
        return problems


def layers_run(drafter: Drafter) -> int:
    """How often some layer of the drafter is run in one training forward."""
    layers = len(getattr(drafter, "layers", ())) or 1
    return layers if drafter.first == 0 else layers * drafter.depth


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
