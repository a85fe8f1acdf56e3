"""Which processes a run has, and the command of each."""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import replace
from pathlib import Path

from data_pipelines.run_folder import RunFolder
from trainer.config import RunConfig

from ..placement import Placement
from .processes import Role


def connect(config: RunConfig, run_dir: Path, ports: dict[str, int]) -> RunConfig:
    """The configuration with the addresses that the children need: of the ledger, its token, the store."""
    if not config.source.streams:
        return config
    cluster = config.cluster
    host = cluster.host
    source = replace(
        config.source,
        ledger=f"{'https' if cluster.tls_cert else 'http'}://{host}:{ports['ledger']}",
        token_file=str(RunFolder(run_dir).token.resolve()),
        # A self-signed certificate is its own authority.
        ca_file=str(Path(config.source.ca_file or cluster.tls_cert).resolve()) if cluster.tls_cert else "",
    )
    store = config.store
    if "store" in ports:
        store = replace(store, master=f"{host}:{ports['store']}")
    elif store.name == "filesystem" and not store.path:
        store = replace(store, path=str(RunFolder(run_dir).store.resolve()))
    return replace(config, source=source, store=store)


def write_token(path: Path) -> None:
    """A new bearer token, readable by its owner only."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32))


def master(config: RunConfig, ports: dict[str, int]) -> Role:
    from data_pipelines.stores.mooncake import library_path, master_command

    found = ":".join(filter(None, [library_path(), os.environ.get("LD_LIBRARY_PATH")]))
    command = master_command(config.cluster.host, ports["store"], ports["metrics"])
    return Role("mooncake", command, {"LD_LIBRARY_PATH": found} if found else {}, server=True)


def ledger(run_dir: Path) -> Role:
    return Role("ledger", [sys.executable, *_draftsmith("ledger", str(run_dir))], server=True)


def producers(config: RunConfig, placement: Placement) -> list[Role]:
    cluster, source = config.cluster, config.source
    common = ["--ledger", source.ledger, "--token-file", source.token_file]
    if source.ca_file:
        common += ["--ca-file", source.ca_file]
    found = []
    for i in range(cluster.producers):
        name, location = f"producer-{i}", placement.producer(i)
        own = ["--name", name]
        if cluster.producer_metrics_port:
            own += ["--metrics-port", str(cluster.producer_metrics_port + i), "--metrics-host", location.host]
        found.append(location.role(name, _draftsmith("produce", *common, *own), _threads(config)))
    return found


def captures(config: RunConfig, run_dir: Path, placement: Placement) -> list[Role]:
    """source=offline: the producers' place is taken by processes that fill the folder of features and end."""
    count = max(1, config.cluster.producers)
    command = ["capture", "--config", str(RunFolder(run_dir).config), "--shard"]
    return [
        placement.capture(i).role(f"capture-{i}", _draftsmith(*command, f"{i}/{count}"), _threads(config))
        for i in range(count)
    ]


def trainer(config: RunConfig, run_dir: Path, placement: Placement, ports: dict[str, int]) -> Role:
    """torchrun on each of the trainer's nodes; signals that ask for a checkpoint are handed on to the ranks."""
    where = ["--standalone"]
    if placement.nodes > 1:
        where = ["--nnodes", str(placement.nodes), "--rdzv-backend", "c10d", "--rdzv-id", secrets.token_hex(8)]
        where += ["--rdzv-endpoint", f"{placement.host}:{ports['rendezvous']}"]
    command = [
        *("-m", "torch.distributed.run", *where),
        *("--nproc-per-node", str(config.cluster.ranks // placement.nodes)),
        *("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"),
        *("-m", "trainer.train", "--config", str(RunFolder(run_dir).config)),
    ]
    return placement.trainer().role("trainer", command, _threads(config))


def _draftsmith(*arguments: str) -> list[str]:
    return ["-m", "launch.cli", *arguments]


def _threads(config: RunConfig) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(config.cluster.threads)} if config.cluster.threads else {}
