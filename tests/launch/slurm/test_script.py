"""What `draftsmith slurm` would submit, without a Slurm: layout, script, sweeps, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_pipelines.errors import UserError
from launch import roles, run
from launch.cli import main
from launch.slurm import nodes
from launch.slurm.layout import Layout, lay_out
from launch.slurm.submit import _local_file_system
from launch.slurm.sweep import combinations
from trainer.config import load_config

SITE = """\
defaults: [slurm, _self_]
name: my_site
slurm:
  account: physics
  partition: hopper
  qos: long
  time: '12:00:00'
  gpus_per_node: 8
  gpu_type: h100
  cpus_per_node: 96
  mem: 900G
  constraint: ib
  reservation: spring
  sbatch: [--mail-type=FAIL]
  modules: [cuda/12.8]
  setup: [source /shared/venv/bin/activate]
  python: python
"""
HEAD = """\
#!/bin/bash
# Written by `draftsmith slurm`. The launcher runs on the first node and takes ranks and producers to theirs with srun.
"""
JOB = """\
#SBATCH --job-name=ci_eagle3
#SBATCH --output=/shared/r/logs/slurm-{id}.log
#SBATCH --open-mode=append
#SBATCH --chdir={here}
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
"""
RESOURCES = """\
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --partition={partition}
#SBATCH --constraint=ib
#SBATCH --gres={gres}
#SBATCH --cpus-per-task=96
#SBATCH --mem={mem}
#SBATCH --account=physics
#SBATCH --qos=long
#SBATCH --time=12:00:00
#SBATCH --reservation=spring
#SBATCH --exclusive
#SBATCH --mail-type=FAIL
"""
BODY = """\

runs=({runs})
run_dir=${{runs[${{SLURM_ARRAY_TASK_ID:-0}}]}}
module load cuda/12.8
source /shared/venv/bin/activate

# Before the time limit, and when the job is preempted, Slurm sends this shell USR1. The launcher then has the ranks write
# a checkpoint, and ends with status 75. SIGTERM (scancel) does the same, without a requeue.
trap 'preempted=yes; kill -TERM $launcher' USR1
trap 'kill -TERM $launcher' TERM
python -m launch.cli run --config "$run_dir/slurm/config.yaml" >>"$run_dir/logs/launcher.log" 2>&1 &
launcher=$!
while kill -0 $launcher 2>/dev/null; do wait $launcher; done # a trap ends a wait
wait $launcher
status=$?
if [ -n "$preempted" ] && {{ [ $status = 75 ] || [ $status = 143 ]; }}; then # 143: it was asked before it listened
  # An array's last task has the number of the whole array, which must not start again.
  task=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
  scontrol requeue "${{task:-$SLURM_JOB_ID}}"
fi
exit $status
"""


@pytest.fixture
def site(tmp_path: Path) -> list[str]:
    """The options that find a site's own file."""
    folder = tmp_path / "mine" / "cluster"
    folder.mkdir(parents=True)
    (folder / "my_site.yaml").write_text(SITE)
    return ["run_dir=/shared/r", "cluster=my_site", "--config-dir", str(folder.parent), "--dry-run"]


def script(capfd: pytest.CaptureFixture, *arguments: str) -> str:
    assert main(["slurm", "ci_eagle3", *arguments]) == 0
    return capfd.readouterr().out


def test_a_job(site: list[str], capfd: pytest.CaptureFixture) -> None:
    """16 ranks on two nodes, 12 producers on two more."""
    said = script(capfd, *site, "global_batch=16", "cluster.ranks=16", "cluster.producers=12")
    resources = RESOURCES.format(nodes=4, partition="hopper", gres="gpu:h100:8", mem="900G")
    assert said == HEAD + JOB.format(id="%j", here=Path.cwd()) + resources + BODY.format(runs="/shared/r")


def test_a_heterogeneous_job(site: list[str], capfd: pytest.CaptureFixture) -> None:
    other = ["partition=ampere", "gpus_per_node=4", "gpu_type=a100", "mem=500G"]
    overrides = [f"cluster.slurm.inference.{key}" for key in other]
    said = script(capfd, *site, "cluster.ranks=4", "cluster.producers=12", *overrides)
    first = RESOURCES.format(nodes=1, partition="hopper", gres="gpu:h100:8", mem="900G")
    second = RESOURCES.format(nodes=3, partition="ampere", gres="gpu:a100:4", mem="500G")
    job = JOB.format(id="%j", here=Path.cwd())
    assert said == HEAD + job + first + "#SBATCH hetjob\n" + second + BODY.format(runs="/shared/r")


def test_a_sweep_is_an_array(site: list[str], capfd: pytest.CaptureFixture) -> None:
    said = script(capfd, *site, "optim.lr=1e-4,3e-4", "seed=1,2", "cluster.slurm.parallel_tasks=2")
    runs = [f"/shared/r/optim.lr={lr},seed={seed}" for lr in ("0.0001", "0.0003") for seed in (1, 2)]
    job = JOB.format(id="%A_%a", here=Path.cwd()) + "#SBATCH --array=0-3%2\n"
    resources = RESOURCES.format(nodes=1, partition="hopper", gres="gpu:h100:8", mem="900G")
    assert said == HEAD + job + resources + BODY.format(runs=" ".join(runs))


def test_runs_that_no_array_can_hold_are_jobs_of_their_own(site: list[str], capfd: pytest.CaptureFixture) -> None:
    said = script(capfd, *site, "cluster.producers=4,12")
    assert said.count("#!/bin/bash") == 2 and "--array" not in said
    assert "--nodes=1\n" in said and "--nodes=3\n" in said
    said = script(capfd, *site, "cluster.slurm.inference.partition=ampere", "seed=1,2")
    assert said.count("#!/bin/bash") == said.count("#SBATCH hetjob") == 2 and "--array" not in said


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["gpus=8", "ranks=4", "producers=4"], Layout(1, 4, 0, 4, 8, 8, False)),  # all on one node
        (["gpus=8", "ranks=8", "producers=1"], Layout(1, 8, 1, 8, 8, 8, False)),
        (["gpus=8", "ranks=16", "producers=24"], Layout(2, 8, 3, 8, 8, 8, False)),
        (["gpus=8", "ranks=12", "producers=9", "slurm.ranks_per_node=6"], Layout(2, 6, 2, 8, 8, 8, False)),
        (["gpus=8", "ranks=4", "producers=4", "slurm.inference.partition=x"], Layout(1, 4, 1, 8, 8, 8, True)),
        (["gpus=8", "ranks=4", "producers=6", "slurm.inference.gpus_per_node=4"], Layout(1, 4, 2, 4, 8, 4, True)),
        (["gpus=0", "ranks=2", "producers=3"], Layout(1, 2, 1, 3, 0, 0, False)),
        (["gpus=0", "ranks=4", "producers=3", "slurm.ranks_per_node=2"], Layout(2, 2, 1, 3, 0, 0, False)),
        (["gpus=0", "ranks=2", "producers=3", "slurm.producers_per_node=1"], Layout(1, 2, 3, 1, 0, 0, False)),
        (["gpus=4", "ranks=8", "producers=8", "source=offline"], Layout(2, 4, 0, 4, 4, 4, False)),
    ],
)
def test_how_many_nodes(overrides: list[str], expected: Layout) -> None:
    overrides = [o.replace("gpus=", "slurm.gpus_per_node=", 1) if o.startswith("gpus=") else o for o in overrides]
    overrides = [o if o.startswith("source=") else f"cluster.{o}" for o in overrides]
    assert lay_out(load_config("ci_eagle3", ["global_batch=48", *overrides])) == expected


def test_every_role_is_a_step_on_its_node_and_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 producers on two nodes of 8 GPUs; in containers, whose interpreter has another name."""
    monkeypatch.setattr(nodes, "_node_address", {"n3": "10.0.0.3", "n4": "10.0.0.4"}.get)
    sized = ["gpus_per_node=8", "ranks_per_node=6", "container_image=/i.sqsh", "container_mounts=[/shared,/scratch]"]
    site = [f"cluster.slurm.{key}" for key in [*sized, "step_python=python3", "srun=['--mpi=none']"]]
    config = load_config(
        "ci_eagle3",
        ["cluster.ranks=12", "global_batch=12", "cluster.producers=12", "cluster.producer_metrics_port=9000", *site],
    )
    places = nodes.JobNodes(config.cluster.slurm, lay_out(config), "10.0.0.1", ["n1", "n2"], ["n3", "n4"])
    step = "srun --overlap --export=ALL --kill-on-bad-exit=1 --cpu-bind=none --mpi=none --nodes={0} --ntasks={0}"
    step += " --ntasks-per-node=1 --nodelist={1} --container-image=/i.sqsh --container-mounts=/shared,/scratch env"
    step += " OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES={2} python3 -m "
    producers = roles.producers(config, places)
    first, last = producers[0], producers[11]
    assert " ".join(first.command).startswith(step.format(1, "n3", "0") + "launch.cli produce")
    assert " ".join(last.command).startswith(step.format(1, "n4", "3") + "launch.cli produce")
    assert last.command[-4:] == ["--metrics-port", "9011", "--metrics-host", "10.0.0.4"]
    trainer = roles.trainer(config, tmp_path, places, {"rendezvous": 29500})
    words = " ".join(trainer.command)
    assert words.startswith(step.format(2, "n1,n2", "0,1,2,3,4,5") + "torch.distributed.run --nnodes 2 ")
    assert "--rdzv-endpoint 10.0.0.1:29500 --nproc-per-node 6 " in words
    assert trainer.elsewhere and first.elsewhere and not trainer.env
    captures = [" ".join(role.command) for role in roles.captures(config, tmp_path, places)]
    assert captures[1].startswith(step.format(1, "n2", "0")) and captures[2].startswith(step.format(1, "n1", "1"))


def test_a_requeued_job_goes_on_from_its_own_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("ci_eagle3", [f"run_dir={tmp_path}", "resume=never"])
    for restarts, saved, resume in ((0, 3, "never"), (1, 3, "auto"), (1, 0, "never")):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        monkeypatch.setattr(run, "newest_step", lambda _, saved=saved: saved)
        assert run.go_on(config).resume == resume


def test_a_folder_that_other_nodes_cannot_see_is_noticed() -> None:
    assert _local_file_system(Path("/dev/shm")) == "tmpfs"
    assert _local_file_system(Path("/proc")) == ""


def test_combinations_are_hydras() -> None:
    assert combinations(["a=1", "drafter.taps=[1,2]"]) == [("", ["a=1", "drafter.taps=[1,2]"])]
    assert [name for name, _ in combinations(["a=1,2", "b=range(1,4)", "c=x"])] == [
        "a=1,b=1", "a=1,b=2", "a=1,b=3", "a=2,b=1", "a=2,b=2", "a=2,b=3",
    ]  # fmt: skip
    assert combinations(["c=x", "target.path=a/b,c/d"])[1] == ("target.path=c_d", ["c=x", "target.path=c/d"])
    with pytest.raises(UserError, match="cannot be swept"):
        combinations(["run_dir=a,b"])
    with pytest.raises(UserError, match="not an override"):
        combinations(["a=[1,"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "cluster.slurm.gpus_per_node is not set"),
        (["cluster.slurm.gpus_per_node=8", "cluster.ranks=12", "global_batch=24"], "evenly over nodes of 8"),
        (["cluster.slurm.gpus_per_node=2", "cluster.slurm.ranks_per_node=4"], "a rank has a GPU of its own"),
        (["cluster.slurm.gpus_per_node=0", "cluster.slurm.time=43200"], "does not say hours"),
        (["cluster.slurm.gpu_per_node=8"], "did you mean cluster.slurm.gpus_per_node?"),
        (["cluster.slurm.gpus_per_node=0", "cluster=my_site"], "my_site"),
        (["cluster.slurm.gpus_per_node=0", "data=jsonl", "data.path=/nowhere.jsonl"], "/nowhere.jsonl does not exist"),
    ],
)
def test_what_cannot_be_submitted(
    arguments: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho submitted\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert main(["slurm", "ci_eagle3", f"run_dir={tmp_path / 'r'}", *arguments]) == 2
    assert said in capfd.readouterr().err
    assert not (tmp_path / "r").exists()


def test_where_there_is_no_slurm(tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["slurm", "ci_eagle3", f"run_dir={tmp_path / 'r'}", "cluster.slurm.gpus_per_node=0"]) == 2
    assert "there is no sbatch here" in capfd.readouterr().err
    words = ["run", "ci_eagle3", f"run_dir={tmp_path / 'r'}", "cluster=slurm", "cluster.slurm.gpus_per_node=0"]
    assert main(words) == 2
    assert "this is not a Slurm job" in capfd.readouterr().err
