"""What can be known to go wrong before anything is started."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from data_pipelines.caches import user_cache
from data_pipelines.errors import UserError
from trainer.config import RunConfig

from .doctor import GIB
from .gpus import place, visible_gpus
from .processes import claim_port

_LEAST_FREE_GIB = 0.5


def needs_stream(config: RunConfig) -> bool:
    """Whether the run has a ledger and producers."""
    return config.source.name in ("stream", "hybrid")


def needs_master(config: RunConfig) -> bool:
    return needs_stream(config) and config.store.name == "mooncake"


def check(config: RunConfig, run_dir: Path) -> dict[str, int]:
    """Raises UserError on the first problem. Returns the ports of the run's servers: ledger, store, metrics."""
    for folder, what in ((run_dir, "the run's folder"), (user_cache(), "the user's cache")):
        _check_writable(folder, what)
    data = config.data.path
    if not data.startswith(("builtin:", "hf:")) and not Path(data).exists():
        raise UserError(
            f"data.path={data} does not exist", fix="a .jsonl file, hf:<dataset id>, builtin:prompts or builtin:demo"
        )
    place(visible_gpus(), config.cluster.ranks, config.cluster.producers)
    if needs_stream(config) and config.cluster.producers < 1:
        raise UserError(
            f"cluster.producers=0 with source={config.source.name}", fix="set at least 1, or source=colocated"
        )
    if needs_stream(config) and config.store.name == "memory":
        raise UserError(
            "store=memory lives in one process, and the stream has several",
            fix="use store=mooncake or store=filesystem, or source=colocated",
        )
    if config.store.master:
        raise UserError(
            f"store.master={config.store.master}: `draftsmith run` starts a store of its own",
            fix="leave it out; to start the roles by hand: draftsmith ledger <recipe> …",
        )
    if not needs_stream(config):
        return {}
    cluster = config.cluster
    ports = {"ledger": claim_port("cluster.ledger_port", cluster.host, cluster.ledger_port)}
    if needs_master(config):
        from data_pipelines.stores.mooncake import find_master

        find_master()
        for name in ("store", "metrics"):
            ports[name] = claim_port(f"cluster.{name}_port", cluster.host, getattr(cluster, f"{name}_port"))
    fixed = [port for port in ports.values()]
    if len(set(fixed)) < len(fixed):
        raise UserError(f"two servers would share a port: {ports}", fix="give each its own, or 0 for any free port")
    return ports


def _check_writable(folder: Path, what: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"{what} cannot be written: {error.strerror}", where=str(folder), fix="choose run_dir=<path>"
        ) from error
    free = shutil.disk_usage(folder).free / GIB
    if free < _LEAST_FREE_GIB:
        raise UserError(
            f"only {free:.2f} GiB are free for {what}", where=str(folder), fix="free some, or choose run_dir=<path>"
        )
