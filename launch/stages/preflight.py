"""What can be known to go wrong before anything is started."""

from __future__ import annotations

import os
import shutil
import ssl
import tempfile
from pathlib import Path

from data_pipelines.caches import user_cache
from data_pipelines.errors import UserError
from trainer.config import RunConfig

from ..placement import Placement
from ..supervision.processes import claim_port
from ..views.doctor import GIB

_LEAST_FREE_GIB = 0.5


def check(config: RunConfig, run_dir: Path, placement: Placement) -> dict[str, int]:
    """Raises UserError on the first problem. Returns the ports of the run's servers: ledger, store, metrics, rendezvous."""
    for folder, what in ((run_dir, "the run's folder"), (user_cache(), "the user's cache")):
        _check_writable(folder, what)
    check_data(config)
    placement.check()
    if config.source.streams and config.cluster.producers < 1:
        raise UserError(
            f"cluster.producers=0 with source={config.source.name}", fix="set at least 1, or source=colocated"
        )
    if config.source.streams and config.store.name == "memory":
        raise UserError(
            "store=memory lives in one process, and the stream has several",
            fix="use store=mooncake or store=filesystem, or source=colocated",
        )
    if config.store.master:
        raise UserError(
            f"store.master={config.store.master}: `draftsmith run` starts a store of its own",
            fix="leave it out; to start the roles by hand: draftsmith ledger <recipe> …",
        )
    cluster, ports = config.cluster, {}
    if placement.nodes > 1:
        ports["rendezvous"] = claim_port("cluster.rendezvous_port", cluster.host, cluster.rendezvous_port)
    if not config.source.streams:
        return ports
    check_tls(config)
    ports |= {"ledger": claim_port("cluster.ledger_port", cluster.host, cluster.ledger_port)}
    if config.has_store:
        from data_pipelines.stores.mooncake import find_master

        find_master()
        for name in ("store", "metrics"):
            ports[name] = claim_port(f"cluster.{name}_port", cluster.host, getattr(cluster, f"{name}_port"))
    taken = {**ports, **({} if cluster.launcher == "slurm" else _metrics_ports(config))}
    if len(set(taken.values())) < len(taken):
        raise UserError(f"two servers would share a port: {taken}", fix="give each its own, or 0 for any free port")
    return ports


def check_data(config: RunConfig) -> None:
    data = config.data.path
    if not data.startswith(("builtin:", "hf:")) and not Path(data).exists():
        raise UserError(
            f"data.path={data} does not exist", fix="a .jsonl file, hf:<dataset id>, builtin:prompts or builtin:demo"
        )
    asked = config.evaluate
    if asked.enabled and not asked.prompts.startswith(("builtin:", "hf:")) and not Path(asked.prompts).exists():
        raise UserError(
            f"evaluate.prompts={asked.prompts} does not exist", fix="a .jsonl file, builtin:eval, or evaluate=none"
        )


def check_tls(config: RunConfig) -> None:
    """Raises UserError unless the certificate can be read and the key is the one that belongs to it."""
    cert, key = config.cluster.tls_cert, config.cluster.tls_key
    if not cert:
        return
    named = {"cluster.tls_cert": cert, "cluster.tls_key": key, "source.ca_file": config.source.ca_file}
    for name, path in named.items():
        if path and not os.access(path, os.R_OK):
            what = "cannot be read" if Path(path).exists() else "does not exist"
            raise UserError(f"{name}={path} {what}", fix="name a PEM file, or leave cluster.tls_* out for plain http")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise UserError(
            f"the ledger cannot use its certificate and key: {error}",
            where=f"{cert}, {key}",
            fix="PEM files of a certificate (with its chain) and of its own key, which has no password",
        ) from error


def _metrics_ports(config: RunConfig) -> dict[str, int]:
    """The ports that ranks and producers will open, checked to be free."""
    cluster, found = config.cluster, {}
    for role, count in (("trainer", cluster.ranks), ("producer", cluster.producers)):
        key = f"cluster.{role}_metrics_port"
        first = getattr(cluster, f"{role}_metrics_port")
        for i in range(count if first else 0):
            found[f"{role} {i}"] = claim_port(key, cluster.host, first + i)
    return found


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
