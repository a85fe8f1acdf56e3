"""`draftsmith slurm` on a real Slurm with three nodes: whole runs, swept, preempted, requeued, heterogeneous, refused.

Two nodes train, with one rank each, and the third one has the producer.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

import psutil
import pytest

from launch.cli import main
from trainer.checkpoint import newest_step

from ..runs import read_summary, steps
from . import site

pytestmark = pytest.mark.cluster
SMALL = ["max_steps=8", "checkpoint.every=3", "cluster.ranks=2", "cluster.producers=1", "evaluate=none"]
NODES = [
    "cluster.slurm.gpus_per_node=0",
    "cluster.slurm.ranks_per_node=1",
    "cluster.slurm.mem=2000",
    "cluster.slurm.time=0:20:00",
]


class Slurm:
    """The commands of a person at the cluster."""

    def __init__(self, environment: dict[str, str]):
        self.environment = environment

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    def draftsmith(self, *arguments: str) -> tuple[int, str]:
        """Its exit status and what it says. In this process: loading torch again takes longer than the rest."""
        with mock.patch.dict(os.environ, self.environment), StringIO() as said:
            with redirect_stdout(said), redirect_stderr(said):
                status = main(list(arguments))
            return status, said.getvalue()

    def submit(self, run_dir: Path, *overrides: str) -> str:
        """The job's number."""
        status, said = self.draftsmith("slurm", "ci_eagle3", f"run_dir={run_dir}", *SMALL, *NODES, *overrides)
        assert status == 0, said
        return said.split()[1].rstrip(":")

    def job(self, job: str) -> dict[str, str]:
        words = self.ask("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.partition("=")[::2] for word in words if "=" in word)

    def preempt(self, job: str) -> None:
        self.ask("scancel", "--batch", "--signal=USR1", job)

    def hurried(self, job: str) -> bool:
        """Whether a requeued job runs. Slurm would let it wait for two minutes; at once the nodes would refuse it, since the
        credentials of its former life were revoked in the same second."""
        job_now = self.job(job)
        if job_now.get("Reason") == "BeginTime":
            time.sleep(5)
            self.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
        return job_now.get("Restarts") == "1" and job_now.get("JobState") == "RUNNING"

    def ended(self, job: str) -> bool:
        return self.job(job).get("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory):
    if why := site.missing():
        pytest.skip(f"SLURM IS NOT TESTED: {why}")
    with site.running(tmp_path_factory.mktemp("slurm")) as environment:
        yield Slurm(environment)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.slurm.partition=nowhere"], "sbatch refused: invalid partition specified: nowhere"),
        (["cluster.slurm.mem=100G"], "Requested node configuration is not available"),
        (["cluster.producers=2", "cluster.slurm.producers_per_node=1"], "takes 4 nodes, and partition all has 3"),
        (["cluster.producers=0", "source=colocated", "cluster.slurm.partition=inference"], "inference has 1"),
    ],
)
def test_what_slurm_would_not_run_is_refused_at_once(
    slurm: Slurm, tmp_path: Path, overrides: list[str], said: str
) -> None:
    status, words = slurm.draftsmith("slurm", "ci_eagle3", f"run_dir={tmp_path / 'r'}", *SMALL, *NODES, *overrides)
    assert status == 2 and said in words, words
    assert slurm.ask("squeue", "--noheader") == ""


def producer_of(run_dir: Path) -> psutil.Process:
    """Not the srun that carries it to its node."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or [""]
        if "produce" in words and str(run_dir / "ledger.token") in words and "srun" not in words[0]:
            return process
    raise AssertionError("there is no producer")


def story(run_dir: Path) -> str:
    """All that a failing test should show."""
    files = [*run_dir.glob("logs/*.log"), *run_dir.glob("../logs/*.log")]
    return "\n".join(f"--- {path}\n{path.read_text()[-3000:]}" for path in files)


@pytest.fixture(scope="module")
def swept(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs as one array, one after the other since each takes all nodes. What is swept does not touch the weights; the
    second one is preempted, as Slurm does it before the time limit; what it was told to begin with does not hold again."""
    folder = tmp_path_factory.mktemp("swept") / "two runs"
    job = slurm.submit(folder, "resume=never", "checkpoint.every=3,100")
    first, second = folder / "checkpoint.every=3", folder / "checkpoint.every=100"
    site.until(lambda: steps(second) >= 2 or slurm.ended(f"{job}_1"), 300)
    slurm.preempt(f"{job}_1")
    site.until(lambda: slurm.hurried(f"{job}_1"), 120)
    site.until(lambda: slurm.ended(f"{job}_1"), 240)
    assert slurm.job(f"{job}_0")["Restarts"] == "0"  # the first one was done
    return first, second


def test_a_sweep_is_an_array_of_whole_runs(swept: tuple[Path, Path]) -> None:
    for run_dir in swept:
        assert (run_dir / "summary.json").exists(), story(run_dir)
        summary = read_summary(run_dir)
        assert (summary["world_size"], summary["producers"], summary["steps"]) == (2, 1, 8)
        for left in ("report.html", "export/config.json", "logs/producer-0.log", "logs/trainer.log", "logs/ledger.log"):
            assert (run_dir / left).is_file(), left


def test_preempted_requeued_and_resumed_to_the_same_weights(swept: tuple[Path, Path]) -> None:
    undisturbed, preempted = swept
    said = (preempted / "logs" / "launcher.log").read_text()
    [kept] = re.findall(r"stopped: (\d) steps are saved", said)
    assert f"going on from step {kept}" in said
    assert read_summary(preempted)["weights_sha256"] == read_summary(undisturbed)["weights_sha256"]


def test_scancel_leaves_a_checkpoint(slurm: Slurm, tmp_path: Path) -> None:
    """Slurm tells the script, the launcher and the steps, all at once."""
    run_dir = tmp_path / "cancelled"
    job = slurm.submit(run_dir, "max_steps=0", "epochs=20", "checkpoint.every=0")
    site.until(lambda: steps(run_dir) >= 2 or slurm.ended(job), 240)
    slurm.ask("scancel", job)
    site.until(lambda: "stopped: " in (run_dir / "logs" / "launcher.log").read_text(), 90)
    assert newest_step(run_dir) >= 2, story(run_dir)
    site.until(lambda: slurm.ended(job), 30)


def test_a_heterogeneous_job_while_it_waits_hangs_and_is_done(
    slurm: Slurm, swept: tuple[Path, Path], tmp_path: Path
) -> None:
    """Two partitions, judged before and after; a producer that freezes on its node; what a person sees of it meanwhile."""
    run_dir = tmp_path / "heterogeneous"
    judged = ["evaluate=chain", "evaluate.max_prompts=4", "evaluate.max_new_tokens=16"]
    judged += ["cluster.hang_seconds=5", "source.lease_seconds=5"]
    device = next(n for n, found in psutil.net_if_addrs().items() if site.address() in (a.address for a in found))
    judged.append(f"cluster.slurm.interface={device}")
    partitions = ["cluster.slurm.partition=training", "cluster.slurm.inference.partition=inference"]
    slurm.ask("scontrol", "update", "PartitionName=inference", "State=DOWN")
    job = slurm.submit(run_dir, *judged, *partitions)
    assert f"Slurm's job {job} is PENDING" in slurm.draftsmith("status", str(run_dir))[1]
    status, said = slurm.draftsmith("slurm", "ci_eagle3", f"run_dir={run_dir}", *NODES, *partitions)
    assert status == 2 and f"job {job} of this run is PENDING" in said
    slurm.ask("scontrol", "update", "PartitionName=inference", "State=UP")
    site.until(lambda: steps(run_dir) >= 1, 240)
    producer = producer_of(run_dir)
    assert producer.environ()["GLOO_SOCKET_IFNAME"] == producer.environ()["NCCL_SOCKET_IFNAME"] == device
    producer.suspend()
    site.until(lambda: slurm.ended(job), 240)
    assert (run_dir / "summary.json").exists(), story(run_dir)
    assert "producer-0 was ended because it was silent for" in (run_dir / "logs" / "launcher.log").read_text()
    summary = read_summary(run_dir)
    assert summary["lossless"] is True and "all" in summary["acceptance"]["after"]
    assert summary["weights_sha256"] == read_summary(swept[0])["weights_sha256"]
    assert "Finished: 8 steps" in slurm.draftsmith("status", str(run_dir))[1]
