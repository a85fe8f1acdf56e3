"""A run that is told to stop waits for its trainer's checkpoint, for as long as it was told to."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from launch.run import stopping_on_signals
from launch.stages import training
from launch.supervision.processes import Stopped, Terminated
from trainer.cluster import ClusterConfig, SlurmConfig


def test_only_a_second_ctrl_c_means_at_once() -> None:
    """Slurm's scancel brings two SIGTERMs."""
    before = signal.getsignal(signal.SIGTERM)
    with stopping_on_signals():
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGTERM)
        try:
            signal.raise_signal(signal.SIGTERM)
        except Terminated:  # an interrupt, which would end pytest itself
            pytest.fail("a second SIGTERM interrupts what the first one asked for")
        for _ in range(2):
            with pytest.raises(Stopped):
                signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("launcher", "grace_seconds", "waits"), [("slurm", 600, 600), ("slurm", 30, 120), ("local", 600, 120)]
)
def test_how_long_a_checkpoint_may_take(
    monkeypatch: pytest.MonkeyPatch, launcher: str, grace_seconds: int, waits: int
) -> None:
    """By a clock that goes a second for each look at a trainer that does not end."""
    slept: list[float] = []
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: len(slept), sleep=slept.append))
    told: list[int] = []
    cluster = ClusterConfig(launcher=launcher, slurm=SlurmConfig(grace_seconds=grace_seconds))
    training._stop_gently(SimpleNamespace(signal=told.append, status=None), cluster)
    assert told == [signal.SIGUSR1] and len(slept) == waits
