"""`draftsmith slurm <recipe>`: a whole run as one job.

The batch script runs `draftsmith run` on the job's first node: stages, supervision, restarts and resumption are those of a
run on one machine. Everything that takes long, preparing the data included, is done in the job; here the configuration is
composed, checked and written down.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

from data_pipelines.errors import UserError
from data_pipelines.files import write_text_atomically
from data_pipelines.run_folder import RunFolder
from trainer.config import RunConfig, load_config, save_config

from ..stages.preflight import check_data
from .layout import Layout, lay_out
from .queue import job_of, remember_job
from .script import options, write_script
from .sweep import combinations

_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "ramfs", "overlay", "zfs")


def command(arguments: argparse.Namespace) -> int:
    jobs = plan_jobs(arguments.recipe, arguments.overrides, arguments.config_dir)
    if arguments.dry_run:
        print("\n".join(write_script(configs, folder, Path.cwd()) for folder, configs in jobs), end="")
        return 0
    if shutil.which("sbatch") is None:
        raise UserError(
            "there is no sbatch here", fix="submit on a machine of a Slurm cluster; --dry-run prints the script"
        )
    for _, configs in jobs:
        _check(configs)
    for folder, configs in jobs:
        _submit(configs, folder)
    return 0


def plan_jobs(recipe: str, overrides: list[str], config_dir: str | None) -> list[tuple[Path, list[RunConfig]]]:
    """(folder, its runs) of each job: one for all runs of a sweep, or, where they differ in their nodes or Slurm has no
    array of such jobs, one for each."""
    runs = []
    for name, chosen in combinations(overrides):
        config = load_config(recipe, chosen, config_dir)
        folder = Path(config.run_dir).absolute()
        cluster = replace(config.cluster, launcher="slurm")
        runs.append((folder, replace(config, run_dir=str(folder / name), cluster=cluster)))
    folder, configs = runs[0][0], [config for _, config in runs]
    one = [options([config], folder, folder) for config in configs]
    if len(one[0]) == 1 and all(other == one[0] for other in one):
        return [(folder, configs)]
    return [(Path(config.run_dir), [config]) for config in configs]


def _check(configs: list[RunConfig]) -> None:
    """Raises UserError for what would fail in the job, or keep it waiting for ever."""
    for config in configs:
        check_data(config)
        job, stands = job_of(Path(config.run_dir))
        if stands:
            raise UserError(
                f"job {job} of this run is {stands}",
                where=config.run_dir,
                fix=f"scancel {job}, or choose run_dir=<path>",
            )
    slurm, layout = configs[0].cluster.slurm, lay_out(configs[0])
    if layout.heterogeneous:
        _check_size(slurm.partition, layout.trainer_nodes)
        _check_size(slurm.inference.partition or slurm.partition, layout.inference_nodes)
    else:
        _check_size(slurm.partition, layout.nodes)


def _check_size(partition: str, nodes: int) -> None:
    """Slurm accepts a job that is larger than its partition, and keeps it waiting."""
    rows = [line.split() for line in _ask("sinfo", "--noheader", "--format=%P %D").splitlines()]
    sizes = {name.removesuffix("*"): int(count) for name, count in rows}
    wanted = partition.split(",") if partition else [name.removesuffix("*") for name, _ in rows if name.endswith("*")]
    known = [sizes[name] for name in wanted if name in sizes]
    if known and nodes > max(known):
        raise UserError(
            f"the job takes {nodes} nodes, and partition {','.join(wanted)} has {max(known)}",
            fix="fewer cluster.ranks or cluster.producers, more of them on a node, or another cluster.slurm.partition",
        )


def _submit(configs: list[RunConfig], folder: Path) -> None:
    runs, home = [RunFolder(config.run_dir) for config in configs], RunFolder(folder)
    for made in (*runs, home):
        made.slurm.mkdir(parents=True, exist_ok=True)
        made.logs.mkdir(parents=True, exist_ok=True)
    for config, run in zip(configs, runs):
        save_config(config, run.slurm / "config.yaml")
    script = home.slurm / "job.sh"
    write_text_atomically(script, write_script(configs, folder, Path.cwd()))
    job = _ask("sbatch", "--parsable", str(script)).strip().partition(";")[0]  # ;<cluster>, where there are several
    for i, config in enumerate(configs):
        remember_job(Path(config.run_dir), f"{job}_{i}" if len(configs) > 1 else job)
    _tell(job, configs, folder, script)


def _tell(job: str, configs: list[RunConfig], folder: Path, script: Path) -> None:
    print(f"job {job}: {_describe(lay_out(configs[0]), len(configs))}; its script: {script}")
    if kind := _local_file_system(folder):
        print(f"warning: {folder} is on a file system of this machine ({kind}); all nodes of the job have to see it")
    for config in configs:
        print(f"  draftsmith status {config.run_dir}")
    print(f"to stop it: scancel {job}; the same command then goes on from the last checkpoint")


def _describe(layout: Layout, runs: int) -> str:
    each = f"{runs} runs, each on " if runs > 1 else ""
    if layout.nodes == 1:
        return f"{each}1 node"
    split = f"{layout.trainer_nodes} for the trainer and {layout.inference_nodes} for inference"
    return f"{each}{layout.nodes} nodes" + (f", {split}" if layout.inference_nodes else "")


def _local_file_system(folder: Path) -> str:
    """The kind of the file system that holds `folder` if other machines cannot have it; else empty. Linux only."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return ""
    device, found = os.stat(folder).st_dev, ""
    for line in mounts.read_text().splitlines():
        _, point, kind, *_ = line.split()
        try:
            if os.stat(point.encode().decode("unicode_escape")).st_dev == device:
                found = kind
        except OSError:
            continue
    return found if found in _LOCAL else ""


def _ask(*command: str) -> str:
    """Raises UserError with the command's own words."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"{command[0]} did not answer for two minutes", fix="is Slurm's controller up? scontrol ping"
        ) from error
    if done.returncode:
        words = "; ".join(line.removeprefix(f"{command[0]}: error: ") for line in done.stderr.splitlines())
        raise UserError(f"{command[0]} refused: {words}", where=" ".join(command))
    return done.stdout
