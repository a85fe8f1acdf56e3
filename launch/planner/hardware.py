"""The machines of a plan: a row of the table of datasheets, or what `draftsmith bench-node` measured."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path

import yaml

from data_pipelines.errors import UserError
from trainer.cluster import HardwareConfig
from trainer.drafters import DRAFTERS

from .assumptions import Assumption
from .simulation.scenario import Costs

TABLE = Path(__file__).with_name("hardware.yaml")
INFERENCE_MFU = Assumption(
    "share of its bf16 peak that a device reaches in the target's prefill",
    0.40,
    "between 0.30 (DeepSeek-V3/R1 inference system overview, deepseek-ai/open-infra-index: 73.7k tokens/s for a node of 8 "
    "H800, 56 % of them cached) and 0.49 (LMSYS, Deploying DeepSeek with PD disaggregation and large-scale expert "
    "parallelism on 96 H100 GPUs, 2025-05-05: 52.3k tokens/s a node), both 37 B parameters active",
)
TRAINING_MFU = Assumption(
    "share of its peak that a device reaches in a drafter's training forward and backward",
    0.25,
    "between 0.14 (SpecForge, examples/disagg/PERF_FINDINGS.md, 5-layer drafter on H200) and 0.38–0.43 (The Llama 3 Herd of "
    "Models, arXiv 2407.21783, table 4, a large dense model)",
)

PACK_CALLS = ("want", "lease", "stored", "locate", "consumed")  # data_pipelines/stream/messages.py
BENCH_TOKENS = 2048  # of a pack that bench-node hands through a ledger


def ledger_seconds(costs: Costs, tokens: float) -> float:
    """Of the ledger's one loop for a pack: its calls, its token ids in two of them, and two long polls that are woken."""
    return sum(costs.ledger[call] for call in PACK_CALLS) + 2 * (costs.wake + tokens * costs.ledger_token)


PUT_RATE = Assumption(
    "bytes a second that a producer encodes and puts into its own segment, while it computes nothing",
    1 / Costs().put_byte,
    "measured here on two loaded cores (the simulation's cost); rather too little for a node of a cluster: SpecForge, "
    "examples/disagg/PERF_FINDINGS.md, puts 3.3e9 over RDMA, encoding not included",
)
GET_RATE = Assumption(
    "bytes a second of one rank's read from the store",
    3.3e9,
    "as SpecForge's put over RDMA, examples/disagg/PERF_FINDINGS.md; over loopback TCP here 1 to 2e9. Copying and verifying "
    f"take {Costs().get_byte:g} s a byte more (the simulation's cost)",
)
DISK_RATE = Assumption(
    "bytes a second that all processes together write to the disk of features, or read from it",
    2.0e9,
    "a guess: one NVMe drive, or a share of a parallel file system; bench-node measures it",
)
LEDGER_RATE = Assumption(
    f"requests a second that one ledger answers, for packs of {BENCH_TOKENS:,} tokens",
    len(PACK_CALLS) / ledger_seconds(Costs(), BENCH_TOKENS),
    "measured here (docs/scale.md, “What the ledger costs”)",
)
LINK_SHARE = Assumption(
    "share of a link's stated rate that transfers reach", 0.8, "a convention: protocol overhead and uneven load"
)


@dataclass(frozen=True)
class Hardware:
    """A device, and the node that it is in. Rates are for each second. host: the devices are cores of one machine, whose
    work is shared by all its processes. mfu and overheads: by drafter (`inference` for the target); overheads are seconds for
    each layer that is run once (with its backward where it is trained), step_seconds those of an optimizer step."""

    name: str
    source: str
    bf16_flops: float
    fp32_flops: float
    memory_bytes: float
    memory_bytes_per_second: float
    peer_bytes_per_second: float
    link_bytes_per_second: float
    devices_per_node: int
    host_memory_bytes: float
    host: bool = False
    mfu: dict[str, float] = field(default_factory=dict)
    overhead_seconds: dict[str, float] = field(default_factory=dict)
    step_seconds: float = 0.0
    store_put_bytes_per_second: float = PUT_RATE.value
    store_get_bytes_per_second: float = GET_RATE.value
    disk_bytes_per_second: float = DISK_RATE.value
    ledger_requests_per_second: float = LEDGER_RATE.value
    nodes: int = 1
    price_per_hour: float = 0.0

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def native_dtype(self) -> str:
        """What `auto` means there."""
        return "bfloat16" if self.bf16_flops > self.fp32_flops else "float32"

    @cached_property
    def costs(self) -> Costs:
        """Of the stream: the simulation's, moved to what bench-node measured."""
        base, slower = Costs(), LEDGER_RATE.value / self.ledger_requests_per_second
        return replace(
            base,
            ledger={call: slower * seconds for call, seconds in base.ledger.items()},
            ledger_token=slower * base.ledger_token,
            wake=slower * base.wake,
            put_byte=1 / self.store_put_bytes_per_second,
        )

    def flops(self, dtype: str) -> float:
        return self.bf16_flops if dtype == "bfloat16" else self.fp32_flops

    def efficiency(self, kind: str) -> float:
        """kind: `inference`, or a drafter's name."""
        return self.mfu.get(kind) or (INFERENCE_MFU if kind == "inference" else TRAINING_MFU).value

    def measured(self, kind: str) -> bool:
        return bool(self.mfu.get(kind))


def resolve_hardware(config: HardwareConfig) -> Hardware:
    """Raises UserError for a device that is neither in the table nor a readable file."""
    row = _row(config.device)
    unknown = sorted(set(row) - {f.name for f in fields(Hardware)})
    missing = sorted(set(_REQUIRED) - set(row))
    if unknown or missing:
        what = f"unknown keys {', '.join(unknown)}" if unknown else f"no value for {', '.join(missing)}"
        raise UserError(f"cluster.hardware.device: {what}", where=config.device, fix="draftsmith bench-node --out FILE")
    hardware = Hardware(**row)
    mfu = dict(hardware.mfu)
    if config.inference_mfu:
        mfu["inference"] = config.inference_mfu
    if config.training_mfu:
        mfu.update(dict.fromkeys(DRAFTERS, config.training_mfu))
    given = {
        key: value
        for key in ("devices_per_node", "link_bytes_per_second", "price_per_hour")
        if (value := getattr(config, key))
    }
    return replace(hardware, mfu=mfu, nodes=config.nodes, **given)


_REQUIRED = [f.name for f in fields(Hardware) if f.default is MISSING and f.default_factory is MISSING]


def _row(device: str) -> dict:
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    if device in table:
        return {"name": device, **table[device]}
    path = Path(device).expanduser()
    if not path.is_file():
        raise UserError(
            f"cluster.hardware.device={device} is neither a row of the table nor a file",
            fix=f"one of {', '.join(table)}, or the file of `draftsmith bench-node --out FILE`",
        )
    try:
        row = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"not a YAML file: {error}", where=device) from error
    if not isinstance(row, dict):
        raise UserError("this file holds no hardware", where=device, fix="draftsmith bench-node --out FILE")
    return {"name": path.stem, "source": f"measured, {device}", **row}
