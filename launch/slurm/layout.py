"""How many nodes a run takes, and what is where on them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from data_pipelines.errors import UserError
from trainer.cluster import InferenceNodes
from trainer.config import RunConfig


@dataclass(frozen=True)
class Layout:
    """The trainer's nodes come first: the launcher, ledger, store and rendezvous are on the first one.

    inference_nodes: 0 when there are no producers, or they have room beside the ranks on the only node.
    heterogeneous: the two kinds of node are two components of the job.
    """

    trainer_nodes: int
    ranks_per_node: int
    inference_nodes: int
    producers_per_node: int
    gpus: int
    inference_gpus: int
    heterogeneous: bool

    @property
    def nodes(self) -> int:
        return self.trainer_nodes + self.inference_nodes


def lay_out(config: RunConfig) -> Layout:
    """Raises UserError when the run cannot be spread evenly over such nodes."""
    cluster, slurm = config.cluster, config.cluster.slurm
    if slurm.gpus_per_node is None:
        raise UserError(
            "cluster.slurm.gpus_per_node is not set",
            fix="add cluster.slurm.gpus_per_node=8 (0 on nodes without GPUs), or a site's file: cluster=my_site",
        )
    gpus = slurm.gpus_per_node
    inference_gpus = gpus if slurm.inference.gpus_per_node is None else slurm.inference.gpus_per_node
    heterogeneous = slurm.inference != InferenceNodes()
    producers = cluster.producers if config.source.streams else 0
    as_they_fit = not (heterogeneous or slurm.ranks_per_node or slurm.producers_per_node)
    if gpus and as_they_fit and cluster.ranks + producers <= gpus:
        return Layout(1, cluster.ranks, 0, producers, gpus, gpus, False)
    ranks = min(slurm.ranks_per_node or gpus or cluster.ranks, cluster.ranks)
    if cluster.ranks % ranks:
        raise UserError(
            f"cluster.ranks={cluster.ranks} cannot be shared out evenly over nodes of {ranks}",
            fix="use a multiple of it, or another cluster.slurm.ranks_per_node",
        )
    each = slurm.producers_per_node or inference_gpus or producers or 1
    layout = Layout(cluster.ranks // ranks, ranks, -(-producers // each), each, gpus, inference_gpus, heterogeneous)
    return layout if producers else replace(layout, heterogeneous=False)
