"""`export_run`: the newest whole checkpoint of a run becomes its export."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from data_pipelines.errors import UserError
from trainer.config import load_config
from trainer.export.run import export_run
from trainer.export.speculators import load_export
from trainer.seal import seal
from trainer.setup import prepare_run
from trainer.target import FrozenTarget


def test_newest_whole_checkpoint(tiny_target, tmp_path):
    overrides = ["target=tiny", "data.max_rows=24", "drafter.draft_vocab_size=100", "export.dtype=float32"]
    config = load_config("ci_eagle3", [f"run_dir={tmp_path}", *overrides])
    setup = prepare_run(config)
    with pytest.raises(UserError, match="no whole checkpoint"):
        export_run(setup)

    frozen = FrozenTarget.load(tiny_target, torch.float32)
    drafter = setup.build_drafter(frozen)
    for step in (20, 40):
        with torch.no_grad():
            drafter.fc.weight.fill_(step)
        _save(drafter, tmp_path / "checkpoints" / f"step_{step:08d}", step)
    damaged = tmp_path / "checkpoints" / "step_00000060"
    _save(drafter, damaged, None)
    with pytest.raises(UserError, match=r"step_00000060 is broken: run\.json is missing"):
        export_run(setup)  # an older one would be another drafter
    shutil.rmtree(damaged)

    out = export_run(setup)
    assert out == tmp_path / "export"
    again = load_export(out, tiny_target.config)
    assert (again.fc.weight == 40).all()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    exported = json.loads((out / "config.json").read_text())
    assert exported["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == config.drafter.steps

    with pytest.raises(UserError, match="there are 20, 40"):
        export_run(setup, step=30)
    earlier = export_run(setup, step=20, out=tmp_path / "e")
    assert (load_export(earlier, tiny_target.config).fc.weight == 20).all()


def _save(drafter, path, step) -> None:
    dcp.save({"model": drafter.state_dict()}, checkpoint_id=path, no_dist=True)
    if step is not None:
        seal(path, step, {})
