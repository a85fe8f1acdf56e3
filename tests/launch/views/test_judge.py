"""`draftsmith judge`: the table of `draftsmith evaluate`, of any drafter; what a person can put right ends with status 2."""

from __future__ import annotations

import json

import pytest
import torch

from launch.cli import main
from trainer.drafters import build_drafter
from trainer.drafters.mtp import MTPConfig
from trainer.export.config import ExportConfig
from trainer.export.speculators import export_drafter
from trainer.target import FrozenTarget

FEW = ["--target", "tiny", "--max-prompts", "3", "--max-new-tokens", "8"]


@pytest.fixture(scope="module")
def export(tmp_path_factory, tiny_target):
    torch.manual_seed(0)
    drafter = build_drafter(MTPConfig(), tiny_target.config, None)
    out = tmp_path_factory.mktemp("drafter") / "export"
    return export_drafter(drafter, FrozenTarget.load(tiny_target, torch.float32), tiny_target, ExportConfig(), out, 3)


def test_it_prints_the_table_and_writes_what_was_measured(export, tmp_path, capsys):
    out = tmp_path / "judged.json"
    assert main(["judge", *FEW, "--draft", str(export), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"mtp drafter {export} for draftsmith/tiny\ndomain")
    assert "\nall " in said and "1…3" in said and "1…4" not in said and "lossless: yes" in said
    judged = json.loads(out.read_text())
    assert (judged["draft_tokens"], judged["target"], judged["drafter"]) == (3, "draftsmith/tiny", "mtp")
    assert f"{judged['overall']['acceptance_length']:.3f}" in said


@pytest.mark.parametrize(("arguments", "words"), [
    (["--draft", "/nowhere"], "/nowhere does not exist"),
    ([], "the following arguments are required: --draft"),
    (["--draft", "{export}", "--batch-size", "0"], "--batch-size 0; it must be at least 1"),
    (["--draft", "{export}", "--prompts", "/nowhere.jsonl"], "--prompts /nowhere.jsonl does not exist"),
    (["--draft", "{export}", "--target", "/nowhere"], "target.path=/nowhere does not exist"),
])  # fmt: skip
def test_what_a_person_can_put_right_ends_with_status_2(export, capfd, arguments, words):
    assert main(["judge", *FEW, *(word.format(export=export) for word in arguments)]) == 2
    said = capfd.readouterr().err
    assert words in said and "Traceback" not in said
