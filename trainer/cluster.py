"""Where the roles of a run live."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from data_pipelines.errors import UserError, check_choice


@dataclass
class HardwareConfig:
    """The machines that `draftsmith plan` counts with; nothing that runs reads it. A device is a GPU, or a core of a machine
    without one.

    device: a row of the planner's table (`h100`, `h200`, `a100`, `b200`, `mi300x`, `cpu`), or a file that `draftsmith
    bench-node --out` wrote. What is 0 here comes from there. devices_per_producer: over which one copy of the target is
    spread; 0: as few as hold it. mfu: the share of its peak that a device reaches.
    """

    device: str = "cpu"
    nodes: int = 1
    devices_per_node: int = 0
    devices_per_producer: int = 0
    inference_mfu: float = 0.0
    training_mfu: float = 0.0
    link_bytes_per_second: float = 0.0  # the network of one node, each way
    price_per_hour: float = 0.0  # of one device

    def __post_init__(self) -> None:
        for key in ("devices_per_node", "devices_per_producer", "link_bytes_per_second", "price_per_hour"):
            if getattr(self, key) < 0:
                raise UserError(f"cluster.hardware.{key}={getattr(self, key)}; it cannot be negative")
        for key in ("inference_mfu", "training_mfu"):
            if not 0 <= getattr(self, key) <= 1:
                raise UserError(f"cluster.hardware.{key}={getattr(self, key)} is not from 0 to 1")
        if self.nodes < 1:
            raise UserError(f"cluster.hardware.nodes={self.nodes}; it must be at least 1")


@dataclass
class InferenceNodes:
    """What differs for the nodes of the producers; empty: as for the trainer's. Any of it makes the job heterogeneous."""

    partition: str = ""
    constraint: str = ""
    gpus_per_node: int | None = None
    gpu_type: str = ""
    cpus_per_node: int = 0
    mem: str = ""

    def __post_init__(self) -> None:
        for key in ("gpus_per_node", "cpus_per_node"):
            if (getattr(self, key) or 0) < 0:
                raise UserError(f"cluster.slurm.inference.{key}={getattr(self, key)}; it cannot be negative")


@dataclass
class SlurmConfig:
    """The job that `draftsmith slurm` submits. How many nodes it has follows from cluster.ranks and cluster.producers.

    gpus_per_node: 0 on nodes without any. ranks_per_node, producers_per_node: 0 is one a GPU, and without GPUs all on one
    node. interface: of the network on which ledger and store listen, and gloo and NCCL talk. What is empty is left out, and
    the site's own default holds.
    """

    gpus_per_node: int | None = None
    ranks_per_node: int = 0
    producers_per_node: int = 0
    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""  # as sbatch takes it, such as '8:00:00'
    constraint: str = ""
    reservation: str = ""
    gpu_type: str = ""  # where a site wants --gres=gpu:<type>:<n>
    cpus_per_node: int = 0
    mem: str = ""  # of a node, such as 900G
    exclusive: bool = True  # whole nodes
    grace_seconds: int = 120  # before the time limit, and at preemption: what a checkpoint may take
    requeue: bool = True  # preempted or out of time, the job goes back into the queue and resumes
    parallel_tasks: int = 0  # of a sweep's array at once; 0: as many as the site lets run
    sbatch: list[str] = field(default_factory=list)  # further options, each one word: --mail-type=FAIL
    srun: list[str] = field(default_factory=list)  # of every step, such as --mpi=none
    modules: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)  # lines of shell before the launcher starts, on the first node
    python: str = ""  # of the launcher; empty: the one that submits
    launcher_prefix: list[str] = field(default_factory=list)  # words before the launcher's command
    container_image: str = ""  # of every step (enroot with pyxis)
    container_mounts: list[str] = field(default_factory=list)
    prefix: list[str] = field(default_factory=list)  # words before every step's command, such as apptainer exec --nv …
    step_python: str = ""  # in the container; empty: the launcher's
    interface: str = ""  # such as ib0, on all nodes; empty: found by the route
    inference: InferenceNodes = field(default_factory=InferenceNodes)

    def __post_init__(self) -> None:
        for key in ("gpus_per_node", "ranks_per_node", "producers_per_node", "cpus_per_node", "parallel_tasks"):
            if (getattr(self, key) or 0) < 0:
                raise UserError(f"cluster.slurm.{key}={getattr(self, key)}; it cannot be negative")
        if self.grace_seconds < 1:
            raise UserError(f"cluster.slurm.grace_seconds={self.grace_seconds}; it must be at least 1")
        if self.time.isdigit():  # YAML reads 12:00:00 as a number to base 60, and sbatch a number as minutes
            raise UserError(
                f"cluster.slurm.time={self.time} does not say hours, minutes and seconds",
                fix="in a file, in quotes: time: '12:00:00'",
            )
        if self.gpus_per_node and self.ranks_per_node > self.gpus_per_node:
            raise UserError(
                f"cluster.slurm.ranks_per_node={self.ranks_per_node}, and a node has {self.gpus_per_node} GPUs",
                fix="a rank has a GPU of its own: leave ranks_per_node out",
            )


@dataclass
class ClusterConfig:
    """Read by the launcher; saved with the run.

    launcher: local (this machine), or slurm (the nodes of the Slurm job that it runs in).
    """

    name: str = "local"
    launcher: str = "local"
    producers: int = 2
    ranks: int = 2
    threads: int = 1  # compute threads of each producer and rank; 0 leaves torch's own choice
    host: str = "127.0.0.1"
    ledger_port: int = 0  # 0: any free port
    store_port: int = 0
    metrics_port: int = 0  # of the store's master
    rendezvous_port: int = 0  # of torchrun, where it starts ranks on several nodes
    trainer_metrics_port: int = 0  # rank r serves Prometheus metrics on this + r; 0: no rank does
    producer_metrics_port: int = 0  # likewise producer i
    tls_cert: str = ""  # PEM files: the ledger then speaks https; callers check it against source.ca_file
    tls_key: str = ""
    max_restarts: int = 3  # of each role, before the run is given up; forgotten after ten healthy minutes
    hang_seconds: float = 60.0  # a process that was silent for as long is ended and started again; 0: wait for ever
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    def __post_init__(self) -> None:
        check_choice("cluster.launcher", self.launcher, ("local", "slurm"))
        if bool(self.tls_cert) != bool(self.tls_key):
            raise UserError(
                "cluster.tls_cert and cluster.tls_key belong together", fix="give both, or neither for plain http"
            )
        if self.ranks < 1:
            raise UserError(f"cluster.ranks={self.ranks}; it must be at least 1")
        for key in ("producers", "threads", "max_restarts", "hang_seconds"):
            if getattr(self, key) < 0:
                raise UserError(f"cluster.{key}={getattr(self, key)}; it cannot be negative")
        servers = {"trainer_metrics_port": self.ranks, "producer_metrics_port": max(1, self.producers)}
        for key in (f.name for f in fields(self) if f.name.endswith("_port")):
            port, highest = getattr(self, key), 65536 - servers.get(key, 1)
            if port and not 0 < port <= highest:
                raise UserError(f"cluster.{key}={port}; it must be from 0 to {highest}")
