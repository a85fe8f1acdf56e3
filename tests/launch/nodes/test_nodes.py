"""Two machines and a link of 100 Mbit/s and 10 ms between them: one run, by the documented commands."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from launch.cli import main
from tests.machines import two_machines
from tests.trainer.running import RECIPE, metrics, result, train

from ..runs import steps
from .cluster import Cluster, Role, ranks

pytestmark = pytest.mark.cluster
RATE, DELAY = 12.5e6, 0.005
STEPS, BATCH = 20, 4
RUN = [*RECIPE, "epochs=9", f"max_steps={STEPS}", "checkpoint.keep=9", "evaluate=none", "source.prefetch=2"]
STREAM = ["source=stream", "source.lease_seconds=5"]


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory) -> Path:
    """The folder of the same run with two ranks on one machine, the target in each."""
    run_dir = tmp_path_factory.mktemp("one_machine")
    train(run_dir, *RUN, ranks=2)
    return run_dir


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("nodes")
    with two_machines(folder, rate=RATE, delay=DELAY) as (a, b, link):
        yield Cluster(folder, (a, b), link, ["ci_eagle3", *RUN, *STREAM, "resume=never"])


@pytest.fixture(scope="module")
def disturbed(cluster) -> list[Role]:
    """Both trainers, after a run of two ranks; the link was cut in it, and a rank killed. It had to begin anew."""
    stale = cluster.run_dir / "checkpoints" / "step_00000099"
    stale.mkdir(parents=True)
    trainers = cluster.start_trainers()
    first, far = trainers[0], cluster.machines[1]
    first.wait_for(lambda: steps(cluster.run_dir) >= 3)
    cluster.link.cut()
    done = steps(cluster.run_dir)
    time.sleep(7)
    assert steps(cluster.run_dir) <= done + 1, "the link is cut: only a step whose last sum was under way can end"
    cluster.link.heal()
    first.wait_for(lambda: steps(cluster.run_dir) >= done + 3)
    [rank] = ranks(far)
    rank.kill()
    for trainer in trainers:
        trainer.ends_well()
    for producer in cluster.producers:
        producer.ends_well()
    assert not stale.exists()
    return trainers


def test_across_a_link_that_is_cut_and_with_a_killed_rank_the_weights_are_those_of_one_machine(
    cluster, disturbed, one_machine
) -> None:
    assert result(cluster.run_dir)["world_size"] == 2
    assert result(cluster.run_dir)["weights_sha256"] == result(one_machine)["weights_sha256"]
    assert [row["step"] for row in metrics(cluster.run_dir)] == [*range(STEPS)]
    assert consumed(disturbed) == {s: {*range(s * BATCH, (s + 1) * BATCH)} for s in range(STEPS)}
    begun = [int(step) for step in re.findall(r"msg=\"steps (\d+)…", disturbed[0].said())]
    assert begun[0] == 0 < begun[1] and len(begun) == 2, "resume=never says where to begin, not where to go on"


def consumed(trainers: list[Role]) -> dict[int, set[int]]:
    """From the ranks' logs: the packs of each step, over all ranks and attempts."""
    found: dict[int, set[int]] = {}
    for trainer in trainers:
        for step, packs in re.findall(r"role=rank-\d+ msg=step step=(\d+) packs=([\d,]+)", trainer.said()):
            found.setdefault(int(step), set()).update(map(int, packs.split(",")))
    return found


def test_nodes_come_and_go_and_the_run_goes_on_with_the_same_packs(cluster, disturbed, one_machine) -> None:
    """From a checkpoint of two ranks on by one, then two, then the second machine is lost."""
    a, b = cluster.machines
    run_dir = cluster.folder / "elastic"
    (run_dir / "checkpoints").mkdir(parents=True)
    shutil.copytree(cluster.run_dir / "checkpoints" / "step_00000004", run_dir / "checkpoints" / "step_00000004")
    shutil.copy(cluster.run_dir / "metrics.jsonl", run_dir)
    elastic = {
        "--nnodes 2": "--nnodes 1:2",
        "is_host=true": "is_host=true,last_call_timeout=3",
        "$RUN/config.yaml": f"$RUN/config.yaml run_dir={run_dir} parallel.timeout_seconds=20 source.patience_seconds=15",
    }
    cluster.start_producers()
    first = cluster.start(a, "the first trainer node", **elastic)
    first.wait_for(lambda: "steps 4…" in first.said())
    first.wait_for(lambda: steps(run_dir) == 6)
    producers = [*a.processes("launch.cli", "produce"), *b.processes("launch.cli", "produce")]
    for producer in producers:
        producer.suspend()
    second = cluster.start(b, "the other trainer nodes", **elastic)
    second.wait_for(lambda: len(ranks(b)) == 1)
    for producer in producers:
        producer.resume()
    second.wait_for(lambda: len(re.findall("role=rank-1 msg=step", second.said())) >= 3)
    b.lose()
    first.ends_well()
    assert consumed([first, second]) == {s: {*range(s * BATCH, (s + 1) * BATCH)} for s in range(4, STEPS)}
    assert result(run_dir)["world_size"] == 1
    for row, expected in zip(metrics(run_dir), metrics(one_machine), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    expected = exported(one_machine)
    for name, weights in exported(run_dir).items():
        assert (weights - expected[name]).norm() <= 1e-4 * expected[name].norm(), name


def exported(run_dir: Path) -> dict[str, torch.Tensor]:
    """The trained weights, in float64."""
    assert main(["export", str(run_dir)]) == 0
    tensors = load_file(run_dir / "export" / "model.safetensors")
    return {name: tensor.double() for name, tensor in tensors.items() if tensor.is_floating_point()}
