"""What `draftsmith slurm` would submit, without a Slurm: layout, script, sweeps, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from data_pipelines.errors import UserError
from launch import run
from launch.cli import main
from launch.slurm import nodes
from launch.slurm.layout import Layout, lay_out
from launch.slurm.queue import job_of, remember_beginning, remember_job
from launch.slurm.script import write_script
from launch.slurm.submit import _local_file_system
from launch.slurm.sweep import combinations
from launch.supervision import roles
from trainer.config import load_config, save_config

from .site import until

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

# Before the time limit, and when the job is preempted, Slurm sends this shell USR1. The launcher then has the ranks write
# a checkpoint, and ends with status 75. SIGTERM (scancel) does the same, without a requeue.
asked= preempted= launcher=
stop() {{
  asked=yes
  [ -z "$launcher" ] || kill -TERM "$launcher" 2>/dev/null || true
}}
trap 'preempted=yes; stop' USR1
trap stop TERM

module load cuda/12.8 || exit
source /shared/venv/bin/activate

python -m launch.cli run --config "$run_dir/slurm/config.yaml" >>"$run_dir/logs/launcher.log" 2>&1 &
launcher=$!
[ -z "$asked" ] || stop # meanwhile
while kill -0 $launcher 2>/dev/null; do wait $launcher || true; done # a trap ends a wait
status=0
wait $launcher || status=$?
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


def test_spaces(site: list[str], tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a person chooses freely; a real sbatch reads such a line in test_jobs.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my work").mkdir()
    monkeypatch.chdir(tmp_path / "my work")
    said = script(capfd, *site, "run_dir='/shared/a b'", "recipe='my run'", "cluster.slurm.sbatch=['--comment=a b']")
    for option in ("--job-name=my run", "--output=/shared/a b/logs/slurm-%j.log", "--comment=a b"):
        assert f"#SBATCH '{option}'\n" in said
    assert f"#SBATCH '--chdir={tmp_path}/my work'\n" in said and "runs=('/shared/a b')\n" in said


LAUNCHER = """\
#!/bin/sh
trap 'exit 75' TERM
echo started >>{folder}/story
while :; do sleep 0.05; done
"""


@pytest.mark.parametrize(
    ("setup", "modules", "told", "status", "story"),
    [
        (["set -eu"], [], "started", 75, ["started", "requeue 7"]),
        # Before the launcher runs; it is asked before it listens, or just after.
        (["echo setup >>{folder}/story", "until [ -e {folder}/go ]; do sleep 0.05; done"], [], "setup", None, None),
        ([], ["nowhere/1.0"], "", 127, []),
    ],
)
def test_the_script_when_the_job_is_preempted(
    tmp_path: Path, setup: list[str], modules: list[str], told: str, status: int | None, story: list[str] | None
) -> None:
    """By the real shell; launcher and scontrol are stand-ins."""
    said = tmp_path / "story"
    said.touch()
    (tmp_path / "logs").mkdir()
    for name, text in (("launcher", LAUNCHER), ("scontrol", '#!/bin/sh\necho "$@" >>{folder}/story\n')):
        (tmp_path / name).write_text(text.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    config = load_config("ci_eagle3", [f"run_dir={tmp_path}", "cluster.slurm.gpus_per_node=0"])
    config.cluster.slurm.python, config.cluster.slurm.modules = str(tmp_path / "launcher"), modules
    config.cluster.slurm.setup = [line.format(folder=tmp_path) for line in setup]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    with subprocess.Popen(["bash", "-c", write_script([config], tmp_path, tmp_path)], env=environment) as shell:
        try:
            if told:
                until(lambda: told in said.read_text(), 30)
                shell.send_signal(signal.SIGUSR1)
                (tmp_path / "go").touch()
            ended = shell.wait(30)
        finally:
            shell.kill()
    if status is None:
        assert ended in (75, 143) and said.read_text().splitlines()[-1] == "requeue 7"
    else:
        assert ended == status and said.read_text().splitlines() == story


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["gpus=8", "ranks=4", "producers=4"], Layout(1, 4, 0, 4, 8, 8, False)),  # all on one node
        (
            ["gpus=8", "ranks=2", "producers=2", "slurm.ranks_per_node=1", "slurm.producers_per_node=1"],
            Layout(2, 1, 2, 1, 8, 8, False),
        ),
        (["gpus=8", "ranks=2", "producers=2", "slurm.producers_per_node=2"], Layout(1, 2, 1, 2, 8, 8, False)),
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
    placement = nodes.JobNodes(config.cluster.slurm, lay_out(config), "10.0.0.1", ["n1", "n2"], ["n3", "n4"])
    step = "srun --overlap --export=ALL --kill-on-bad-exit=1 --cpu-bind=none --mpi=none --nodes={0} --ntasks={0}"
    step += " --ntasks-per-node=1 --nodelist={1} --container-image=/i.sqsh --container-mounts=/shared,/scratch env"
    step += " OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES={2} python3 -m "
    producers = roles.producers(config, placement)
    first, last = producers[0], producers[11]
    assert " ".join(first.command).startswith(step.format(1, "n3", "0") + "launch.cli produce")
    assert " ".join(last.command).startswith(step.format(1, "n4", "3") + "launch.cli produce")
    assert last.command[-4:] == ["--metrics-port", "9011", "--metrics-host", "10.0.0.4"]
    trainer = roles.trainer(config, tmp_path, placement, {"rendezvous": 29500})
    words = " ".join(trainer.command).replace(f"sh -c {nodes._HOSTED_BY_ONE} n1 ", "")
    assert words.startswith(step.format(2, "n1,n2", "0,1,2,3,4,5") + "torch.distributed.run --nnodes 2 ")
    assert "--rdzv-endpoint 10.0.0.1:29500 --nproc-per-node 6 " in words
    assert trainer.elsewhere and first.elsewhere and not trainer.env
    captures = [" ".join(role.command) for role in roles.captures(config, tmp_path, placement)]
    assert captures[1].startswith(step.format(1, "n2", "0")) and captures[2].startswith(step.format(1, "n1", "1"))


def test_the_steps_use_the_interface_and_the_first_node_holds_the_rendezvous(tmp_path: Path) -> None:
    sized = ["gpus_per_node=0", "ranks_per_node=1", "producers_per_node=1", "interface=ib0"]
    config = load_config("ci_eagle3", [f"cluster.slurm.{key}" for key in sized])
    placement = nodes.JobNodes(config.cluster.slurm, lay_out(config), "10.0.0.1", ["n1", "n2"], ["n3", "n4"])
    words = roles.trainer(config, tmp_path, placement, {"rendezvous": 29500}).command
    assert words[words.index("n1") + 1 :][:4] == [
        "env", "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=ib0", "NCCL_SOCKET_IFNAME=ib0",
    ]  # fmt: skip
    shell = words[words.index("sh") :][:4]
    for node, holds in (("n1", "true"), ("n2", "false")):
        said = subprocess.run(
            [*shell, "env"], env={**os.environ, "SLURMD_NODENAME": node}, capture_output=True, text=True
        )
        assert f"PET_RDZV_CONF=is_host={holds}" in said.stdout.splitlines()


def test_a_requeued_job_goes_on_from_its_own_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told to start afresh, it does so until its own trainer has begun."""
    config = load_config("ci_eagle3", [f"run_dir={tmp_path}", "resume=never"])
    began = replace(config, resume="auto")  # as the trainer leaves it
    save_config(began, tmp_path / "config.yaml")  # an earlier run's
    monkeypatch.setenv("SLURM_JOB_ID", "6")
    remember_beginning(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert run.go_on(config).resume == "never"
    save_config(config, tmp_path / "config.yaml")
    remember_beginning(tmp_path)
    assert run.go_on(config).resume == "never"
    save_config(began, tmp_path / "config.yaml")
    assert run.go_on(config).resume == "auto"
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    assert run.go_on(config).resume == "never"


@pytest.mark.parametrize(
    ("said", "stands"),
    [
        ("PENDING (None)\nPENDING\n", "PENDING"),
        ("PENDING (Resources)\nPENDING (Priority)\n", "PENDING (Resources), PENDING (Priority)"),
        ("RUNNING (None)\n", "RUNNING"),
        ("", ""),
    ],
)
def test_how_a_job_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, stands: str) -> None:
    """squeue has a line for each component of a heterogeneous job."""
    (tmp_path / "squeue").write_text(f"#!/bin/sh\nprintf '{said}'\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "slurm").mkdir()
    remember_job(tmp_path, "7")
    assert job_of(tmp_path) == ("7", stands)


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
    for wrong in ("a=[1,", "a=range(1,9,0)", "a=interval(0,1)"):
        with pytest.raises(UserError, match="not an override"):
            combinations([wrong])
    with pytest.raises(UserError, match=r"seed=range\(1,0\) has no values"):
        combinations(["a=1,2", "seed=range(1,0)"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "cluster.slurm.gpus_per_node is not set"),
        (["cluster.slurm.gpus_per_node=8", "cluster.ranks=12", "global_batch=24"], "evenly over nodes of 8"),
        (["cluster.slurm.gpus_per_node=2", "cluster.slurm.ranks_per_node=4"], "a rank has a GPU of its own"),
        (["cluster.slurm.gpus_per_node=0", "cluster.slurm.time=43200"], "does not say hours"),
        (["cluster.slurm.gpu_per_node=8"], "did you mean cluster.slurm.gpus_per_node?"),
        (["cluster.slurm.gpus_per_node=0", "cluster=my_site"], "my_site"),
        (["cluster.ranks=0"], "cluster.ranks=0; it must be at least 1"),
        (["cluster.producers=-1"], "cluster.producers=-1; it cannot be negative"),
        (["cluster.threads=-1"], "cluster.threads=-1; it cannot be negative"),
        (["cluster.max_restarts=-1"], "cluster.max_restarts=-1; it cannot be negative"),
        (["cluster.slurm.inference.gpus_per_node=-1"], "inference.gpus_per_node=-1; it cannot be negative"),
        (["cluster.ledger_port=70000"], "cluster.ledger_port=70000; it must be from 0 to 65535"),
        (["cluster.store_port=-1"], "cluster.store_port=-1; it must be from 0 to 65535"),
        (["cluster.trainer_metrics_port=65535"], "cluster.trainer_metrics_port=65535; it must be from 0 to 65534"),
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


def test_a_job_as_it_is_not_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container without Slurm's client, and of other components than the run."""
    for name, value in {"PATH": tmp_path, "SLURM_JOB_ID": 7, "SLURMD_NODENAME": "n1"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    alone = load_config("ci_eagle3", ["source=colocated", "cluster.slurm.gpus_per_node=0"])
    assert nodes.nodes_of_this_job(alone).host == "127.0.0.1"
    several = load_config("ci_eagle3", ["cluster.slurm.gpus_per_node=0"])
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    with pytest.raises(UserError, match="there is no scontrol here"):
        nodes.nodes_of_this_job(several)
    mixed = load_config("ci_eagle3", ["cluster.slurm.gpus_per_node=0", "cluster.slurm.inference.partition=ampere"])
    with pytest.raises(UserError, match="a job of two components, and this one has one"):
        nodes.nodes_of_this_job(mixed)
