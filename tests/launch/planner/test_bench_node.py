"""bench-node measures what plans take."""

from __future__ import annotations

import pytest
import torch
import yaml

from launch.planner import probes
from launch.planner.bench_node import fit, lines
from launch.planner.hardware import TABLE, resolve_hardware
from launch.planner.reference import EMPTY, Measured, run_drafters, run_step, run_target
from trainer.cluster import HardwareConfig


def test_share_and_overhead_explain_both_runs():
    large, small = Measured(9e9, 1e9, 0.0, 4), Measured(1e6, 0.0, 0.0, 2)
    share, overhead, peak, attention = 0.4, 0.003, 1e11, 5e10

    def seconds(run):
        return (run.matmul / peak + run.attention / attention) / share + run.layers * overhead

    timed = [Measured(r.matmul, r.attention, seconds(r), r.layers) for r in (large, small)]
    assert fit(*timed, peak, attention) == pytest.approx((share, overhead))


def test_probes_run_the_real_things(monkeypatch):
    monkeypatch.setattr(probes, "SECONDS", 0.02)
    device = torch.device("cpu")
    assert probes.matmul_rate(torch.float32, device) > 1e8
    target, drafters = run_target(EMPTY, torch.float32, device), run_drafters(EMPTY, torch.float32, device)
    assert set(drafters) == {"eagle3", "mtp", "dflash", "dspark"}
    assert all(run.seconds > 0 and run.matmul > 0 for run in (target, *drafters.values()))
    assert run_step(torch.float32) >= 0
    put, got = probes.store_rates(1 << 20, rounds=2)
    assert put > 1e6 and got > 1e6
    assert probes.ledger_rate(packs=40, tokens=64) > 10


def test_what_it_writes_is_a_row_of_hardware(tmp_path):
    row = yaml.safe_load(TABLE.read_text())["cpu"]  # as bench-node wrote it
    file = tmp_path / "node.yaml"
    file.write_text(yaml.safe_dump(row))
    hardware = resolve_hardware(HardwareConfig(device=str(file)))
    assert hardware.host and hardware.measured("inference") and hardware.measured("dspark")
    assert len(lines(row)) >= 15
