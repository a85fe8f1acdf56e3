"""The batch script of a run, or of the runs of a sweep."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import jinja2

from trainer.cluster import SlurmConfig
from trainer.config import RunConfig

from .layout import Layout, lay_out


def write_script(configs: list[RunConfig], folder: Path, chdir: Path) -> str:
    """One job; of several runs, with nodes alike, an array of as many tasks.

    folder: of the job, for what Slurm itself writes. chdir: where relative paths begin.
    """
    slurm = configs[0].cluster.slurm
    text = Path(__file__).with_name("job.sh.j2").read_text()
    template = jinja2.Template(text, trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    return template.render(
        # sbatch takes a line for words, quoted as in a shell.
        components=[[shlex.quote(option) for option in component] for component in options(configs, folder, chdir)],
        runs=shlex.join(config.run_dir for config in configs),
        setup=[*(f"module load {module} || exit" for module in slurm.modules), *slurm.setup],
        launcher=shlex.join([*slurm.launcher_prefix, slurm.python or sys.executable, "-m", "launch.cli"]),
        requeue=slurm.requeue,
    )


def options(configs: list[RunConfig], folder: Path, chdir: Path) -> list[list[str]]:
    """The #SBATCH options: of each component, if the job is heterogeneous."""
    slurm, layout, array = configs[0].cluster.slurm, lay_out(configs[0]), len(configs) > 1
    job = [
        f"--job-name={configs[0].recipe}",
        f"--output={folder / 'logs' / ('slurm-%A_%a.log' if array else 'slurm-%j.log')}",
        "--open-mode=append",
        f"--chdir={chdir}",
        f"--signal=B:USR1@{slurm.grace_seconds}",
        "--requeue" if slurm.requeue else "--no-requeue",
    ]
    if array:
        at_once = f"%{slurm.parallel_tasks}" if slurm.parallel_tasks else ""
        job.append(f"--array=0-{len(configs) - 1}{at_once}")
    everywhere = [
        *_given(account=slurm.account, qos=slurm.qos, time=slurm.time, reservation=slurm.reservation),
        *(["--exclusive"] if slurm.exclusive else []),
        *slurm.sbatch,
    ]
    trainer = {
        "partition": slurm.partition,
        "constraint": slurm.constraint,
        "gres": _gres(slurm.gpu_type, layout.gpus),
        "cpus_per_task": slurm.cpus_per_node,
        "mem": slurm.mem,
    }
    if not layout.heterogeneous:
        return [[*job, *_nodes(layout.nodes), *_given(**trainer), *everywhere]]
    first = [*job, *_nodes(layout.trainer_nodes), *_given(**trainer), *everywhere]
    return [first, [*_nodes(layout.inference_nodes), *_given(**_inference(slurm, layout, trainer)), *everywhere]]


def _inference(slurm: SlurmConfig, layout: Layout, trainer: dict[str, str | int]) -> dict[str, str | int]:
    """What the nodes of the producers have instead of, or as well as, the trainer's."""
    own = slurm.inference
    return {
        "partition": own.partition or trainer["partition"],
        "constraint": own.constraint or trainer["constraint"],
        "gres": _gres(own.gpu_type or slurm.gpu_type, layout.inference_gpus),
        "cpus_per_task": own.cpus_per_node or trainer["cpus_per_task"],
        "mem": own.mem or trainer["mem"],
    }


def _nodes(count: int) -> list[str]:
    return [f"--nodes={count}", "--ntasks-per-node=1"]


def _gres(kind: str, count: int) -> str:
    return ":".join(filter(None, ["gpu", kind, str(count)])) if count else ""


def _given(**values: str | int) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value]
