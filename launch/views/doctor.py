"""`draftsmith doctor`: is this machine ready? One line a check, with the fix where something is missing."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from data_pipelines.caches import user_cache
from data_pipelines.errors import UserError

GIB = 1024**3
_MOONCAKE_WHEELS = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")


@dataclass(frozen=True)
class Finding:
    """What one check found. fix: what to do about it; empty when it is fine."""

    name: str
    found: str
    fix: str = ""

    @property
    def ok(self) -> bool:
        return not self.fix


def examine(folder: Path) -> Iterator[Finding]:
    """All checks, cheap ones first. folder: where runs will be written."""
    yield _python()
    yield from _torch()
    yield from _mooncake()
    yield _disk("disk for runs", folder, 5)
    yield _disk("disk for the cache", user_cache(), 2)
    yield _shared_memory()
    yield _ports()


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    fix = "" if sys.version_info >= (3, 11) else "Draftsmith needs Python 3.11 or later"
    return Finding("python", f"{version}, {sys.executable}", fix)


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("torch", f"does not import: {error}", "make setup")
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    gpu = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
    if gpu and not torch.version.cuda:
        yield Finding("torch", f"{torch.__version__}, a CPU build beside a GPU", "rm -rf .venv && make setup")
    else:
        yield Finding("torch", f"{torch.__version__}, {build} build")
    if torch.cuda.is_available():
        names = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
        yield Finding("GPU", f"{torch.cuda.device_count()} × {', '.join(names)}")
    elif gpu and torch.version.cuda:
        yield Finding("GPU", "there is one, but torch cannot use it", "update the driver, or install a matching torch")
    else:
        yield Finding("GPU", "none: everything runs on the CPU")


def _mooncake() -> Iterator[Finding]:
    installed = {}
    for name in _MOONCAKE_WHEELS:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    wheels = ", ".join(f"{name} {version}" for name, version in installed.items())
    if not installed:
        yield Finding("Mooncake's wheel", "not installed", "make setup (or: pip install 'draftsmith[cpu]' or '[cuda]')")
        return
    fix = (
        f"they overwrite each other: pip uninstall -y {' '.join(installed)} && make setup" if len(installed) > 1 else ""
    )
    yield Finding("Mooncake's wheel", wheels, fix)
    try:
        from data_pipelines.stores.mooncake import find_master

        yield Finding("Mooncake's master", str(find_master()))
    except UserError as error:
        yield Finding("Mooncake's master", error.what, error.fix or "make setup")
    except (ImportError, OSError) as error:
        yield Finding("Mooncake's module", f"does not import: {error}", "apt-get install libibverbs1 libnuma1 libcurl4")


def _disk(name: str, folder: Path, wanted_gib: int) -> Finding:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / GIB
    fix = "" if free >= wanted_gib else f"free some: {wanted_gib} GiB let the demo and small runs pass"
    return Finding(name, f"{free:.0f} GiB free at {folder.resolve()}", fix)


def _shared_memory() -> Finding:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return Finding("shared memory", "no /dev/shm on this system: not needed on one machine without GPUs")
    size = shutil.disk_usage(shm).total / GIB
    fix = "" if size >= 0.06 else "several GPUs need more: in a container, --shm-size=8g or --ipc=host"
    return Finding("shared memory", f"{size:.2f} GiB in /dev/shm", fix)


def _ports() -> Finding:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return Finding("ports", "free ones on 127.0.0.1")
    except OSError as error:
        return Finding("ports", f"none can be opened on 127.0.0.1: {error}", "let this user open ports on the loopback")
