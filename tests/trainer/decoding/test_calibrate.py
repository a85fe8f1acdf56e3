"""`draftsmith calibrate` on the export of a DSpark drafter that was trained for seconds on the tiny target."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from speculators import SpeculatorModelConfig

from data_pipelines.conversations.rows import read_rows
from data_pipelines.engines.anatomy import tap_hidden_states
from data_pipelines.errors import UserError
from launch.cli import main
from tests.trainer.decoding.test_dflash_chain import COMMON, NEW, K, trained
from tests.trainer.decoding.test_eagle3_chain import eos, frozen, model, prompts  # noqa: F401
from trainer.config import load_config, save_config
from trainer.decoding.calibrate import calibrate_run, halve
from trainer.decoding.chain import decode_chain, decode_plain
from trainer.decoding.evaluate import Prompt, render_prompts
from trainer.drafters import build_drafter
from trainer.drafters.base import Committed
from trainer.drafters.dspark import DSparkConfig
from trainer.export.config import ExportConfig
from trainer.export.speculators import export_drafter, load_export

SMALL = ["evaluate.max_prompts=40", "evaluate.max_new_tokens=48", "evaluate.batch_size=20"]


@pytest.fixture(scope="module")
def drafter(tiny_target, model, frozen):  # noqa: F811
    """On answers to prompts of the kind that it is judged on, so that some drafts there are right and some wrong."""
    rows = list(read_rows("builtin:prompts", 24, 0))
    rendered, _ = render_prompts(rows, tiny_target.load_tokenizer(), 256)
    asked = [list(prompt.tokens) for prompt in rendered]
    answers = [answer.tokens for answer in decode_plain(model, asked, max_new_tokens=48)]
    config = DSparkConfig(**COMMON, block_size=K, markov_rank=16)
    return trained(config, tiny_target, model, frozen, asked, answers)


@pytest.fixture
def run(tmp_path, tiny_target, frozen, drafter):  # noqa: F811
    """A run's folder as a finished run leaves it, as far as this command reads it, and its config."""
    config = load_config("ci_dspark", [f"run_dir={tmp_path}", *SMALL])
    save_config(config, tmp_path / "config.yaml")
    export_drafter(
        drafter, frozen, tiny_target, ExportConfig(verifier=tiny_target.path), tmp_path / "export", drafter.depth
    )
    return tmp_path, config


def test_every_round_hands_out_its_confidence(model, frozen, prompts, eos, drafter):  # noqa: F811
    """The same numbers as the drafter gives, run alone on one round from scratch, with its own drafts as what came before."""
    given = {"draft_tokens": K, "max_new_tokens": NEW, "eos_ids": eos}
    together = decode_chain(model, prompts, drafter, frozen, **given)
    for prompt, text in zip(prompts, together):
        assert len(text.confidence) == text.rounds and {len(c) for c in text.confidence} == {K}
        (alone,) = decode_chain(model, [prompt], drafter, frozen, **given)
        torch.testing.assert_close(torch.tensor(text.confidence), torch.tensor(alone.confidence), atol=1e-4, rtol=1e-4)
    tapped, tokens = [], torch.tensor([prompts[0] + together[0].tokens[:1]])
    hook = drafter.norm.register_forward_hook(lambda module, inputs, out: tapped.append(out))
    n = tokens.shape[1] - 1
    with tap_hidden_states(model, drafter.taps) as recorder:
        model(tokens[:, :-1], use_cache=False)
    rows = Committed(
        recorder.taps, recorder.final, tokens[:, 1:], torch.arange(n)[None], torch.ones(1, n, dtype=torch.bool)
    )
    drafts = drafter.propose(drafter.new_state(1), rows, frozen, K)
    hook.remove()
    previous = torch.cat([tokens[:, -1:], drafts[:, :-1]], 1)
    features = torch.cat([tapped[0], drafter.markov_head.markov_w1(previous)], -1)
    expected = drafter.confidence_head.proj(features)[0, :, 0].detach()
    torch.testing.assert_close(torch.tensor(together[0].confidence[0]), expected, atol=1e-4, rtol=1e-4)


def test_end_to_end(run, tiny_target, capsys):
    run_dir, _ = run
    before = json.loads((run_dir / "export" / "config.json").read_text())
    assert main(["calibrate", str(run_dir)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ["draft", "temperature", "rounds", "accepted", "ECE", "BRIER", "AUC"]
    assert [line.split()[0] for line in said[1:-1]] == ["1", "2", "3", "4"] and "20 prompts" in said[-1]

    measured = json.loads((run_dir / "evaluation" / "calibration.json").read_text())
    assert measured["prompts"] == {"fitted": 20, "held_out": 20}
    assert [p["temperature"] for p in measured["positions"]] == measured["temperatures"] and len(
        measured["temperatures"]
    ) == K
    first = measured["positions"][0]
    assert 0.2 < first["before"]["accepted"] < 0.98  # else there is nothing to foresee
    assert first["after"]["auc"] == pytest.approx(first["before"]["auc"]) and first["before"]["auc"] > 0.5
    # On rounds that it was not fitted on.
    eces = [sum(p[when]["ece"] for p in measured["positions"]) for when in ("before", "after")]
    assert eces[1] < eces[0], measured

    # The export is what it was, and carries the temperatures, also past the classes that read it.
    after = json.loads((run_dir / "export" / "config.json").read_text())
    assert after.pop("confidence_temperatures") == measured["temperatures"] and after == before
    assert SpeculatorModelConfig.from_pretrained(run_dir / "export").confidence_temperatures == measured["temperatures"]
    load_export(run_dir / "export", tiny_target.config)

    # A function of the export and the config.
    assert main(["calibrate", str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == measured


def test_refusals(run, tiny_target, frozen):  # noqa: F811
    run_dir, config = run
    with pytest.raises(UserError, match="at least 20 are needed"):
        calibrate_run(replace(config, evaluate=replace(config.evaluate, max_prompts=4, max_new_tokens=8)), run_dir)
    assert "confidence_temperatures" not in json.loads((run_dir / "export" / "config.json").read_text())
    assert main(["calibrate", str(run_dir / "nowhere")]) == 2


def test_a_drafter_without_confidence(run, tiny_target, frozen):  # noqa: F811
    run_dir, config = run
    plain = build_drafter(DSparkConfig(**COMMON, block_size=K, confidence_weight=0.0), tiny_target.config, None)
    export_drafter(plain, frozen, tiny_target, ExportConfig(), run_dir / "export", plain.depth)
    with pytest.raises(UserError, match="this dspark drafter has no confidence to calibrate"):
        calibrate_run(config, run_dir)


def test_halves():
    prompts = [Prompt(str(i), "ab"[i % 2] if i < 20 else "rare", (1,)) for i in range(23)]  # noqa: F811
    one, other = halve(prompts, 0)
    assert sorted(one + other) == list(range(23)) and abs(len(one) - len(other)) <= 1
    for domain, count in (("a", 10), ("b", 10), ("rare", 3)):
        assert abs(sum(prompts[i].domain == domain for i in one) - count / 2) <= 1
    assert halve(prompts, 0) == (one, other) != halve(prompts, 1)
