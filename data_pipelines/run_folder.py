"""A run's folder: what stands where, said once for all who write or read it (docs/runs.md)."""

from __future__ import annotations

from pathlib import Path


class RunFolder:
    """The paths of a run. None of them is created here."""

    def __init__(self, path: Path | str):
        self.path = path = Path(path)
        self.config = path / "config.yaml"  # resolved
        self.checkpoints = path / "checkpoints"  # step_*
        self.export = path / "export"
        self.evaluation = path / "evaluation"  # before.json, after.json, and the plain decoding of the prompts
        self.metrics = path / "metrics.jsonl"  # a line a step
        self.logs = path / "logs"  # <role>.log
        self.quarantine = path / "quarantine.jsonl"  # rows that are not trained on
        self.quarantined_packs = path / "quarantined_packs.jsonl"  # packs that nobody could compute
        self.training = path / "training.json"  # the trainer's result
        self.records = path / "records"  # what stages found, for a second call
        self.summary = path / "summary.json"
        self.report = path / "report.html"
        self.token = path / "ledger.token"
        self.ledger = path / "ledger.json"  # the ledger's settings
        self.features = path / "features"  # source=offline and hybrid
        self.store = path / "store"  # store=filesystem
        self.slurm = path / "slurm"  # the job's script, its config as submitted, its number

    @property
    def results(self) -> list[Path]:
        """All that a run which begins anew must not find."""
        return [
            self.checkpoints, self.export, self.records, self.evaluation, self.features, self.store, self.metrics,
            self.training, self.summary, self.report, self.quarantine, self.quarantined_packs,
        ]  # fmt: skip
