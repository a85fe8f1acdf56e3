"""`draftsmith bench-node`: what this machine does, as the hardware of a plan.

draftsmith bench-node --out node.yaml
draftsmith plan <recipe> cluster.hardware.device=node.yaml
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table

from data_pipelines.engines import resolve_dtype

from . import probes
from .reference import EMPTY, LARGE, SMALL, Measured, run_drafters, run_step, run_target
from .show import count


def command(arguments: argparse.Namespace) -> None:
    console = Console(highlight=False)
    with console.status("measuring, about a minute") as status:
        row = measure(lambda what: status.update(f"measuring {what}"))
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in lines(row):
        table.add_row(name, value)
    console.print(table)
    if arguments.out:
        path = Path(arguments.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(row, sort_keys=False), encoding="utf-8")
        console.print(f"\nwritten to {path}: cluster.hardware.device={path}", soft_wrap=True)


def measure(tell: Callable[[str], None] = lambda what: None) -> dict[str, Any]:
    """A row of the hardware table."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    threads = torch.get_num_threads()
    if not cuda:
        torch.set_num_threads(1)  # a device is one core
    try:
        return _measure(device, cuda, tell)
    finally:
        torch.set_num_threads(threads)


def _measure(device: torch.device, cuda: bool, tell: Callable[[str], None]) -> dict[str, Any]:
    tell("arithmetic and memory")
    host_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    devices = torch.cuda.device_count() if cuda else cores
    row: dict[str, Any] = {
        "source": f"measured by draftsmith bench-node on {datetime.date.today()}: {_name(cuda)}",
        "host": not cuda,
        "bf16_flops": probes.matmul_rate(torch.bfloat16, device),
        "fp32_flops": probes.matmul_rate(torch.float32, device),
        "memory_bytes": float(torch.cuda.get_device_properties(0).total_memory if cuda else host_memory / cores),
        "memory_bytes_per_second": probes.memory_rate(device),
        "devices_per_node": devices,
        "host_memory_bytes": float(host_memory),
    }
    if cuda:
        row["peer_bytes_per_second"] = probes.host_copy_rate(
            device
        )  # the least that two GPUs of a node have between them
    dtype = resolve_dtype("auto")
    peak = row["bf16_flops"] if dtype == torch.bfloat16 else row["fp32_flops"]
    tell("a target's layers")
    scale = LARGE if cuda else SMALL
    row["mfu"], row["overhead_seconds"] = {}, {}
    pairs = {"inference": (run_target(scale, dtype, device), run_target(EMPTY, dtype, device))}
    tell("training steps of the drafters")
    full, empty = run_drafters(scale, dtype, device), run_drafters(EMPTY, dtype, device)
    pairs |= {name: (full[name], empty[name]) for name in full}
    for name, (large, small) in pairs.items():
        attention = peak if name == "inference" else row["fp32_flops"]
        row["mfu"][name], row["overhead_seconds"][name] = fit(large, small, peak, attention)
    row["step_seconds"] = run_step(dtype)
    tell("sockets, store and disk")
    loopback = probes.socket_rate()
    row["link_bytes_per_second"] = loopback
    row.setdefault("peer_bytes_per_second", loopback)
    row["store_put_bytes_per_second"], row["store_get_bytes_per_second"] = probes.store_rates()
    row["disk_bytes_per_second"] = probes.disk_rate(Path.cwd())
    tell("the ledger")
    row["ledger_requests_per_second"] = probes.ledger_rate()
    return _rounded(row)


def fit(large: Measured, small: Measured, peak: float, attention_peak: float) -> tuple[float, float]:
    """(share of the peak, seconds of a layer that computes nothing): both runs then took ideal / share + layers · seconds."""
    ideal = [run.matmul / peak + run.attention / attention_peak for run in (large, small)]
    slope = (large.seconds - small.seconds * large.layers / small.layers) / (
        ideal[0] - ideal[1] * large.layers / small.layers
    )
    slope = max(slope, 1.0)  # never faster than the peak
    overhead = max(0.0, (small.seconds - slope * ideal[1]) / small.layers)
    return 1 / slope, overhead


def _name(cuda: bool) -> str:
    if cuda:
        return f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    model = next(
        (line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine()
    )
    return f"one core of {model}, torch {torch.__version__}"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _rounded(value: Any) -> Any:
    """To four digits: no measurement has more."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def lines(row: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, how much) for people."""
    units = {"_flops": "FLOP/s", "_bytes_per_second": "B/s", "_bytes": "B", "_requests_per_second": "requests/s"}
    shown = [("", row["source"])]
    for key, value in row.items():
        if isinstance(value, dict):
            for name, item in value.items():
                text = f"{item:.0%} of the peak" if key == "mfu" else f"{item * 1e3:.2f} ms a layer besides"
                shown.append((f"{name}", text))
        elif key == "step_seconds":
            shown.append(("optimizer step", f"{value * 1e3:.1f} ms besides"))
        elif isinstance(value, float):
            ending = next(end for end in units if key.endswith(end))
            shown.append((key.removesuffix(ending).replace("_", " "), f"{count(value)}{units[ending]}"))
        elif key == "devices_per_node":
            shown.append(("devices", str(value)))
    return shown
