"""The nodes of the Slurm job that the launcher runs in, and the `srun` that takes a process to one of them."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass, replace

from data_pipelines.errors import UserError
from data_pipelines.network import own_address
from trainer.cluster import SlurmConfig
from trainer.config import RunConfig

from ..placement import LocalPlacement, Location, Placement
from .layout import Layout, lay_out

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
# torchrun would guess whether it is to hold the rendezvous, from what its host name resolves to: every node may get that
# wrong. srun runs one command on all nodes, hence its option as a variable, which is set where it runs.
_HOSTED_BY_ONE = '[ "$SLURMD_NODENAME" = "$0" ] && is=true || is=false; exec env PET_RDZV_CONF=is_host=$is "$@"'


def nodes_of_this_job(config: RunConfig) -> Placement:
    """Raises UserError outside of a job, on another than its first node, and in one of another size."""
    layout, slurm = lay_out(config), config.cluster.slurm
    if "SLURM_JOB_ID" not in os.environ:
        raise UserError(
            "cluster.launcher=slurm, and this is not a Slurm job",
            fix=f"draftsmith slurm {config.recipe} … submits one; cluster=local runs on this machine",
        )
    if layout.heterogeneous:
        lists = [os.environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{i}") for i in range(2)]
        if None in lists:
            raise UserError(
                "cluster.slurm.inference asks for a job of two components, and this one has one",
                fix="salloc <options of the trainer's nodes> : <options of the others>, or let draftsmith slurm submit it",
            )
        trainers, inference = map(_hostnames, lists)
    else:
        names = _hostnames(os.environ["SLURM_JOB_NODELIST"])
        trainers, inference = names[: layout.trainer_nodes], names[layout.trainer_nodes :]
    if (len(trainers), len(inference)) != (layout.trainer_nodes, layout.inference_nodes):
        raise UserError(
            f"the job has {len(trainers) + len(inference)} nodes, and this run takes {layout.trainer_nodes} for the "
            f"trainer and {layout.inference_nodes} for inference",
            fix=f"sbatch --nodes={layout.nodes}, or let draftsmith slurm write the script",
        )
    if os.environ.get("SLURMD_NODENAME") != trainers[0]:
        raise UserError(
            f"the launcher has to run on the job's first node, {trainers[0]}",
            fix=f"srun --overlap --nodelist={trainers[0]} --nodes=1 --ntasks=1 --pty draftsmith run …",
        )
    host = _address(slurm, trainers[0], (*trainers[1:], *inference))
    if layout.nodes == 1:
        return LocalPlacement(config.cluster, host)
    return JobNodes(slurm, layout, host, trainers, inference)


@dataclass
class JobNodes:
    """trainers, inference: names of nodes."""

    slurm: SlurmConfig
    layout: Layout
    host: str
    trainers: list[str]
    inference: list[str]

    @property
    def nodes(self) -> int:
        return len(self.trainers)

    def check(self) -> None:
        """The nodes were counted when the job was laid out; how many GPUs each has is Slurm's to see to."""

    def producer(self, i: int) -> Location:
        node, slot = divmod(i, self.layout.producers_per_node)
        return self._location([self.inference[node]], self._gpu(slot, self.layout.inference_gpus), inference=True)

    def capture(self, i: int) -> Location:
        """Nobody trains yet: the trainer's GPUs are there to be shared out."""
        slot, node = divmod(i, self.nodes)
        return self._location([self.trainers[node]], self._gpu(slot, self.layout.gpus))

    def trainer(self) -> Location:
        gpus = range(self.layout.ranks_per_node if self.layout.gpus else 0)
        location = self._location(self.trainers, tuple(map(str, gpus)))
        if self.nodes == 1:
            return location
        return replace(location, prefix=(*location.prefix, "sh", "-c", _HOSTED_BY_ONE, self.trainers[0]))

    def _gpu(self, slot: int, gpus: int) -> tuple[str, ...]:
        return (str(slot % gpus),) if gpus else ()

    def _location(self, nodes: list[str], gpus: tuple[str, ...], *, inference: bool = False) -> Location:
        """One task on each of the nodes. A step shares what its nodes have with the other steps, and has all of it."""
        slurm = self.slurm
        words = ["srun", "--overlap", "--export=ALL", "--kill-on-bad-exit=1", "--cpu-bind=none", *slurm.srun]
        if self.layout.heterogeneous:
            words.append(f"--het-group={int(inference)}")
        words += [f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]
        words.append(f"--nodelist={','.join(nodes)}")
        if slurm.container_image:
            words.append(f"--container-image={slurm.container_image}")
        if slurm.container_mounts:
            words.append(f"--container-mounts={','.join(slurm.container_mounts)}")
        host = _node_address(nodes[0]) if inference else self.host
        named = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), slurm.interface) if slurm.interface else {}
        return Location(host, gpus, (*words, *slurm.prefix), slurm.step_python or sys.executable, named)


def _address(slurm: SlurmConfig, own: str, others: tuple[str, ...]) -> str:
    """Of this node: of the interface that was named, else the one on which the other nodes are reached."""
    if not slurm.interface and not others and shutil.which("scontrol") is None:
        return "127.0.0.1"  # in a container without Slurm's client: nobody else has to find it
    if not slurm.interface:
        return own_address(_node_address(others[-1])) if others else _node_address(own)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", slurm.interface[:15].encode())
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError as error:
            there = ", ".join(name for _, name in socket.if_nameindex())
            raise UserError(
                f"cluster.slurm.interface={slurm.interface} has no IPv4 address here: {error.strerror}",
                where=own,
                fix=f"one of {there}",
            ) from error


def _hostnames(nodelist: str) -> list[str]:
    if not set(nodelist) & set("[,"):  # n1; not n[1-3]
        return [nodelist]
    return _ask("scontrol", "show", "hostnames", nodelist).split()


def _node_address(name: str) -> str:
    """Slurm knows nodes by names that need not be host names."""
    known = re.search(r"\bNodeAddr=(\S+)", _ask("scontrol", "show", "node", "--oneliner", name))
    try:
        return socket.gethostbyname(known[1] if known else name)
    except OSError as error:
        raise UserError(f"the address of node {name} is not known here: {error}") from error


def _ask(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UserError(
            f"there is no {command[0]} here, and a run on several nodes needs Slurm's client",
            fix="run the launcher outside of the container, or in an image with Slurm's client",
        ) from error
    if done.returncode:
        raise UserError(f"{command[0]} says: {done.stderr.strip()}", where=" ".join(command))
    return done.stdout
