"""A real Slurm on this machine: munged, slurmctld and three slurmd, all in one folder and on free ports.

Debian's and Ubuntu's slurmd is built to allow several on one host (`slurmd -N`). Nothing is emulated but the other
machines: all nodes have this one's address.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from getpass import getuser
from pathlib import Path

from data_pipelines.network import own_address

NODES = ("n1", "n2", "n3")
_PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel")
_SBIN = "/usr/sbin"  # not on every user's PATH


def missing() -> str:
    """Why no Slurm can be started here; empty if one can. Root installs what is missing."""
    absent = [name for name in _PROGRAMS if _find(name) is None]
    if absent and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for step in (["update"], ["install", "-y", "--no-install-recommends", *_PACKAGES]):
            subprocess.run(["apt-get", "-qq", *step], env=environment, capture_output=True)
        absent = [name for name in _PROGRAMS if _find(name) is None]
    if absent:
        return f"no {', '.join(absent)} here; on Debian and Ubuntu, as root: apt-get install {' '.join(_PACKAGES)}"
    return ""


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:{_SBIN}")


def address() -> str:
    """Of this machine on its network: no loopback, which torchrun takes for its own on every node."""
    try:
        return own_address("192.0.2.1")  # RFC 5737: nobody's
    except OSError:
        return "127.0.0.1"


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _write_configuration(folder: Path) -> Path:
    controller, *ports = _free_ports(1 + len(NODES))
    node = f"NodeHostname=localhost NodeAddr={address()} CPUs=2 RealMemory=8000"
    text = f"""
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={getuser()}
SlurmdUser={getuser()}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=60
PartitionName=all Nodes=n[1-3] Default=YES MaxTime=30
PartitionName=training Nodes=n[1-2] MaxTime=30
PartitionName=inference Nodes=n3 MaxTime=30
"""
    text += "".join(f"NodeName={name} Port={port} {node}\n" for name, port in zip(NODES, ports, strict=True))
    path = folder / "slurm.conf"
    path.write_text(text)
    return path


@contextmanager
def running(folder: Path) -> Iterator[dict[str, str]]:
    """Yields the environment in which Slurm's commands find this cluster."""
    configuration = _write_configuration(folder)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    folder.chmod(0o755)  # munged refuses a socket that others cannot reach
    environment = {**os.environ, "SLURM_CONF": str(configuration), "PATH": f"{os.environ['PATH']}:{_SBIN}"}
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munged += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    commands = [munged, ["slurmctld", "-D", "-c"], *(["slurmd", "-D", "-N", name] for name in NODES)]
    daemons: list[subprocess.Popen] = []
    try:
        for i, command in enumerate(commands):
            with (folder / f"{i}-{command[0]}.log").open("wb") as log:
                daemons.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
                )
            if i == 0:
                until((folder / "munge.socket").exists, 10)
        until(lambda: _idle(environment) == list(NODES), 30)
        yield environment
    finally:
        subprocess.run(["scancel", f"--user={getuser()}"], env=environment, capture_output=True)
        until(lambda: not _words(environment, "squeue", "--noheader"), 20, fail=False)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _words(environment: dict[str, str], *command: str) -> list[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout.split()


def _idle(environment: dict[str, str]) -> list[str]:
    return sorted(set(_words(environment, "sinfo", "--noheader", "--Node", "--states=idle", "--format=%N")))


def until(condition: Callable[[], object], seconds: float, *, fail: bool = True) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            assert not fail, "waited in vain"
            return
        time.sleep(0.1)
