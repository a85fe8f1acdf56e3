"""Which processes a run has on this machine, and the command of each."""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import replace
from pathlib import Path

from trainer.config import RunConfig

from .gpus import place, visible_gpus
from .preflight import needs_stream
from .processes import Role


def connect(config: RunConfig, run_dir: Path, ports: dict[str, int]) -> RunConfig:
    """The configuration with the addresses that the children need: of the ledger, its token, the store."""
    if not needs_stream(config):
        return config
    cluster = config.cluster
    host = cluster.host
    source = replace(
        config.source,
        ledger=f"{'https' if cluster.tls_cert else 'http'}://{host}:{ports['ledger']}",
        token_file=str((run_dir / "ledger.token").resolve()),
        # A self-signed certificate is its own authority.
        ca_file=str(Path(config.source.ca_file or cluster.tls_cert).resolve()) if cluster.tls_cert else "",
    )
    store = config.store
    if "store" in ports:
        store = replace(store, master=f"{host}:{ports['store']}")
    elif store.name == "filesystem" and not store.path:
        store = replace(store, path=str((run_dir / "store").resolve()))
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
    return Role("ledger", _draftsmith("ledger", str(run_dir)), server=True)


def producers(config: RunConfig) -> list[Role]:
    cluster, source = config.cluster, config.source
    common = ["--ledger", source.ledger, "--token-file", source.token_file]
    if source.ca_file:
        common += ["--ca-file", source.ca_file]
    _, devices = place(visible_gpus(), cluster.ranks, cluster.producers)
    found = []
    for i in range(cluster.producers):
        own = ["--name", f"producer-{i}"]
        if cluster.producer_metrics_port:
            own += ["--metrics-port", str(cluster.producer_metrics_port + i), "--metrics-host", cluster.host]
        environment = {**_threads(config), **_gpus(devices[i : i + 1])}
        found.append(Role(f"producer-{i}", _draftsmith("produce", *common, *own), environment))
    return found


def captures(config: RunConfig, run_dir: Path) -> list[Role]:
    """source=offline: the producers' place is taken by processes that fill the folder of features and end."""
    count = max(1, config.cluster.producers)
    command = ["capture", "--config", str(run_dir / "config.yaml"), "--shard"]
    gpus = visible_gpus()  # nobody else runs yet: all of them
    environments = [{**_threads(config), **_gpus([gpus[i % len(gpus)]] if gpus else [])} for i in range(count)]
    return [Role(f"capture-{i}", _draftsmith(*command, f"{i}/{count}"), environments[i]) for i in range(count)]


def trainer(config: RunConfig, run_dir: Path) -> Role:
    """torchrun with a rendezvous on any free port; signals that ask for a checkpoint are handed on to the ranks."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(config.cluster.ranks)),
        *("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"),
        *("-m", "trainer.train", "--config", str(run_dir / "config.yaml")),
    ]
    devices, _ = place(visible_gpus(), config.cluster.ranks, config.cluster.producers)
    return Role("trainer", command, {**_threads(config), **_gpus(devices)})


def _draftsmith(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "launch.cli", *arguments]


def _gpus(names: list[str]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)} if names else {}


def _threads(config: RunConfig) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(config.cluster.threads)} if config.cluster.threads else {}
