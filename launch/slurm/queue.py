"""What Slurm's queue says of a run's job. Nothing is imported that loads torch: `draftsmith status` asks as well."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from data_pipelines.files import write_text_atomically
from data_pipelines.run_folder import RunFolder

_JOB = "job.json"
_BEGUN = "begun"


def remember_job(run_dir: Path, job: str) -> None:
    write_text_atomically(RunFolder(run_dir).slurm / _JOB, json.dumps({"job": job}))


def job_of(run_dir: Path) -> tuple[str, str]:
    """(job, how it stands: such as `PENDING (Resources)`) of the run's last job; empty when there is none, or it ended."""
    path = RunFolder(run_dir).slurm / _JOB
    if not path.exists():
        return "", ""
    job = json.loads(path.read_text())["job"]
    try:
        asked = subprocess.run(
            ["squeue", "--noheader", f"--job={job}", "--format=%T (%r)"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):  # not a machine of the cluster, or a controller that is away
        return job, ""
    lines = asked.stdout.splitlines() if not asked.returncode else []  # it fails for jobs that are forgotten
    stands = [line.strip().removesuffix(" (None)") for line in lines]  # one for each component of a heterogeneous job
    return job, ", ".join(dict.fromkeys(stands))


def remember_beginning(run_dir: Path) -> None:
    """In a Slurm job: config.yaml, and what else is in the run's folder, is this job's from now on."""
    if job := os.environ.get("SLURM_JOB_ID"):
        write_text_atomically(RunFolder(run_dir).slurm / _BEGUN, job)


def begun_before(run_dir: Path) -> bool:
    """Whether this Slurm job was requeued after `remember_beginning`."""
    path = RunFolder(run_dir).slurm / _BEGUN
    requeued = int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0
    return requeued and path.exists() and path.read_text() == os.environ.get("SLURM_JOB_ID")
