"""Where the judge's target goes and in which precision, decided from file sizes and free memory before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data_pipelines.engines import Target
from data_pipelines.engines.anatomy import anatomy
from data_pipelines.engines.targets import auto_class, weight_files
from data_pipelines.errors import UserError

from .config import EvaluateConfig
from .judges import NotJudged

GIB = 1024**3
FILLED = 0.9  # of the free memory, at most, with weights: the rest is for caches, activations and the drafter
WIDE = {"F64", "F32", "F16", "BF16"}  # safetensors' names of the types that are loaded in the dtype asked for
FIX = "judge it on a machine with more memory (draftsmith evaluate <run_dir>), or leave it out with evaluate=none"


@dataclass(frozen=True)
class Device:
    """name: as torch has it. free: bytes."""

    name: str
    free: int


@dataclass(frozen=True)
class Weights:
    """The target's checkpoint. numbers: how many there are that can be loaded in any precision. packed: bytes of the others,
    which stay as they are stored."""

    numbers: int
    packed: int

    def size(self, dtype: torch.dtype) -> int:
        return self.numbers * dtype.itemsize + self.packed


@dataclass(frozen=True)
class Placement:
    """device_map: module name → device, as accelerate takes it; None: the whole target on the machine's first device."""

    dtype: torch.dtype
    devices: tuple[Device, ...]
    bytes: int
    device_map: dict[str, str] | None = None

    def __str__(self) -> str:
        where = _names(self.devices)
        text = f"{_name(self.dtype)} on {where}: {_gib(self.bytes)} of weights, {_gib(_free(self.devices))} free"
        return text if self.dtype == torch.float32 else f"{text}; where two logits nearly tie, texts may differ"


def find_devices() -> list[Device]:
    """The GPUs that this process may use, or the CPU."""
    if not torch.cuda.is_available():
        return [Device("cpu", host_memory())]
    return [Device(f"cuda:{i}", torch.cuda.mem_get_info(i)[0]) for i in range(torch.cuda.device_count())]


def host_memory() -> int:
    """Bytes of this machine's memory that are available, within the limit of this process's control group."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no limit, or another kind of control group
        return available
    return min(available, max(0, limit - used))


def place(target: Target, cfg: EvaluateConfig, devices: Sequence[Device] | None = None, host: int = -1) -> Placement:
    """float32 on one device where it fits, else on several GPUs; else the same in bfloat16. evaluate.dtype names one.

    devices, host: free memory, of this machine by default. Raises NotJudged, with the figures, if nothing fits.
    """
    devices = find_devices() if devices is None else list(devices)
    host = host_memory() if host < 0 else host
    weights = read_weights(target)
    quantised = getattr(target.whole_config, "quantization_config", None) is not None
    automatic = [torch.bfloat16] if quantised else [torch.float32, torch.bfloat16]
    dtypes = automatic if cfg.dtype == "auto" else [getattr(torch, cfg.dtype)]
    for dtype in dtypes:
        size = weights.size(dtype)
        if roomy := next((device for device in devices if size <= FILLED * device.free), None):
            # It goes through the host's memory unless accelerate puts each tensor where it belongs.
            direct = roomy.name != "cpu" and (roomy != devices[0] or size > FILLED * host)
            return Placement(dtype, (roomy,), size, {"": roomy.name} if direct else None)
        if len(devices) > 1 and (device_map := spread(target, dtype, size, devices)):
            used = tuple(device for device in devices if device.name in device_map.values())
            return Placement(dtype, used, size, device_map)
    needs = " or ".join(f"{_gib(weights.size(dtype))} in {_name(dtype)}" for dtype in dtypes)
    raise NotJudged(
        f"the target's weights take {needs}, and {_gib(_free(devices))} are free on {_names(devices)}",
        where=target.path,
        fix=FIX,
    )


def load(target: Target, placement: Placement) -> nn.Module:
    return target.load_model(placement.dtype, placement.device_map)


def read_weights(target: Target) -> Weights:
    """Counted from the headers of the checkpoint's files, or from the sizes of files that have none."""
    numbers = packed = 0
    try:
        files = weight_files(Path(target.path))
    except (OSError, ValueError, KeyError) as error:
        raise NotJudged(f"the index of the target's weights cannot be read: {error}", where=target.path) from error
    if not files:
        raise NotJudged("the target's folder holds no weights", where=target.path)
    stored = getattr(target.config, "dtype", None) or torch.float32
    for file in files:
        if file.suffix != ".safetensors":
            numbers += file.stat().st_size // stored.itemsize
            continue
        try:
            tensors = list(_tensors(file))
        except (OSError, ValueError, KeyError) as error:
            raise NotJudged(f"the target's weights cannot be read: {error}", where=str(file)) from error
        for kind, count, size in tensors:
            numbers, packed = (numbers + count, packed) if kind in WIDE else (numbers, packed + size)
    return Weights(numbers, packed)


def spread(target: Target, dtype: torch.dtype, size: int, devices: Sequence[Device]) -> dict[str, str] | None:
    """Decoder layers in their order over the devices, everything else on the first one, where the drafter is; None if the
    layers do not fit. size: bytes of the whole checkpoint; a layer is counted with its share of it."""
    if size > FILLED * _free(devices):
        return None
    with torch.device("meta"):
        model = auto_class(target.whole_config).from_config(target.whole_config, dtype=dtype)
    try:
        layers = anatomy(model).layers
    except UserError as error:
        raise NotJudged(f"{error.what}: it cannot be spread over several GPUs", where=target.path, fix=FIX) from error
    numbers = sum(p.numel() for p in model.parameters())
    of_layers = [size * sum(p.numel() for p in layer.parameters()) / numbers for layer in layers]
    left = [FILLED * device.free for device in devices]
    left[0] -= size - sum(of_layers)
    placed: dict[str, str] = {}
    at = 0
    for name, module in _pieces(model, layers):
        if not any(module is layer for layer in layers):
            placed[name] = devices[0].name
            continue
        needed = of_layers.pop(0)
        while at < len(devices) and left[at] < needed:
            at += 1
        if at == len(devices):
            return None
        left[at] -= needed
        placed[name] = devices[at].name
    return placed if left[0] >= 0 else None


def _pieces(module: nn.Module, layers: nn.ModuleList, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The decoder layers, and the largest modules that hold none of them, by name."""
    for name, child in module.named_children():
        if any(part is layers for part in child.modules()):
            yield from _pieces(child, layers, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _tensors(file: Path) -> Iterator[tuple[str, int, int]]:
    """(type, how many numbers, bytes) of each tensor of a safetensors file, from its header."""
    with file.open("rb") as f:
        header: dict[str, Any] = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    for name, tensor in header.items():
        if name != "__metadata__":
            start, end = tensor["data_offsets"]
            count = 1
            for length in tensor["shape"]:
                count *= length
            yield tensor["dtype"], count, end - start


def _free(devices: Sequence[Device]) -> int:
    return sum(device.free for device in devices)


def _names(devices: Sequence[Device]) -> str:
    names = [device.name for device in devices]
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}…{names[-1]}"


def _gib(size: int) -> str:
    if size < GIB / 10:
        return f"{size / 1024**2:,.1f} MiB"
    return f"{size / GIB:,.1f} GiB" if size < 10 * GIB else f"{size / GIB:,.0f} GiB"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
