"""Where the numbers of a run go: always metrics.jsonl; a tracker by option."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from data_pipelines.errors import check_choice
from data_pipelines.plugins import Registry
from data_pipelines.run_folder import RunFolder


class Mirror(Protocol):
    """Somebody else's record of a run."""

    def log(self, row: dict[str, Any]) -> None:
        """One line of metrics.jsonl: `step` and numbers."""

    def close(self) -> None: ...


# name → start(TrackerConfig, the run's folder, RunConfig)
TRACKERS: Registry[Callable[[Any, Path, Any], Mirror]] = Registry("tracker")


@TRACKERS.register("wandb")
class Wandb:
    def __init__(self, config: TrackerConfig, run_dir: Path, run_config: Any):
        import wandb

        self._run = wandb.init(
            project=config.project, name=run_dir.name, dir=str(run_dir), mode=config.mode, config=asdict(run_config)
        )

    def log(self, row: dict[str, Any]) -> None:
        self._run.log({k: v for k, v in row.items() if k != "step"}, step=row["step"])

    def close(self) -> None:
        self._run.finish()


@dataclass
class TrackerConfig:
    """name: none, wandb, or one that a plug-in registers. mode: wandb's online or offline; offline needs neither account
    nor network."""

    name: str = "none"
    project: str = "draftsmith"
    mode: str = "offline"
    options: dict[str, Any] = field(default_factory=dict)  # of a tracker of your own

    def __post_init__(self) -> None:
        if self.name != "none":
            TRACKERS.choose(self.name)
        check_choice("tracker.mode", self.mode, ("online", "offline"))


class Tracker:
    """Appends one JSON object a step to `metrics.jsonl` and, if asked to, mirrors it to a tracker.

    The file is the record: it is flushed at every line, so that a killed run keeps what it logged. A resumed run drops
    the lines past its checkpoint, so that each step stands there once.
    """

    def __init__(self, config: TrackerConfig, run_dir: Path, run_config: Any, *, start_step: int):
        self._path = RunFolder(run_dir).metrics
        kept = [row for row in read_metrics(run_dir) if row["step"] < start_step]
        self._file = self._path.open("w")
        for row in kept:
            self._write(row)
        self._mirror = None if config.name == "none" else TRACKERS.choose(config.name)(config, run_dir, run_config)

    def log(self, row: dict[str, Any]) -> None:
        self._write(row)
        if self._mirror is not None:
            self._mirror.log(row)

    def close(self) -> None:
        self._file.close()
        if self._mirror is not None:
            self._mirror.close()

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The logged steps of a run; a half-written last line (a kill) is left out."""
    path = RunFolder(run_dir).metrics
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
