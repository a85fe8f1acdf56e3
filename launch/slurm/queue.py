"""What Slurm's queue says of a run's job. Nothing is imported that loads torch: `draftsmith status` asks as well."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

FOLDER = "slurm"  # in the run's folder: job.sh, config.yaml (as submitted), job.json
_JOB = "job.json"


def remember_job(run_dir: Path, job: str) -> None:
    (run_dir / FOLDER / _JOB).write_text(json.dumps({"job": job}))


def job_of(run_dir: Path) -> tuple[str, str]:
    """(job, how it stands: such as `PENDING (Resources)`) of the run's last job; empty when there is none, or it ended."""
    path = run_dir / FOLDER / _JOB
    if not path.exists():
        return "", ""
    job = json.loads(path.read_text())["job"]
    try:
        asked = subprocess.run(
            ["squeue", "--noheader", f"--job={job}", "--format=%T (%r)"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):  # not a machine of the cluster, or a controller that is away
        return job, ""
    said = asked.stdout.strip() if not asked.returncode else ""  # it fails for jobs that are forgotten
    return job, said.removesuffix(" (None)")
