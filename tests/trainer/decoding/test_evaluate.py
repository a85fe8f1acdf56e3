"""A run's drafter is judged before training and after, on held-out prompts, from what lies in the run's folder."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from data_pipelines.conversations.rows import Row
from data_pipelines.errors import UserError
from trainer.config import load_config
from trainer.decoding.config import EvaluateConfig
from trainer.decoding.evaluate import decode_reference, evaluate, render_prompts
from trainer.decoding.run import evaluate_run
from trainer.export.speculators import export_drafter
from trainer.setup import prepare_run
from trainer.target import FrozenTarget


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    return load_config(
        "ci_eagle3",
        [
            f"run_dir={run_dir}", "target=tiny", "data.max_rows=24", "evaluate.max_prompts=10",
            "evaluate.max_new_tokens=24", "evaluate.draft_tokens=3", "evaluate.batch_size=4", "export.dtype=float32",
        ],
    )  # fmt: skip


@pytest.fixture(scope="module")
def setup(config):
    return prepare_run(config)


@pytest.fixture(scope="module")
def frozen(tiny_target):
    return FrozenTarget.load(tiny_target, torch.float32)


def test_before_and_after(config, setup, frozen, tiny_target):
    before = evaluate_run(config, setup.run_dir, "before")
    written = json.loads((setup.run_dir / "evaluation" / "before.json").read_text())
    assert written == before
    assert before["lossless"] is True and before["mismatches"] == [] and before["skipped"] == []
    assert 1 <= before["overall"]["acceptance_length"] < 1.3  # an untrained drafter
    for key in ("rounds", "tokens", "prompts"):
        assert before["overall"][key] == sum(numbers[key] for numbers in before["domains"].values())
    assert len(before["domains"]) > 1 and before["overall"]["prompts"] == 10
    assert len(before["overall"]["prefix_rate"]) == len(before["overall"]["conditional_rate"]) == 3
    assert before["speedup"] == pytest.approx(before["seconds"]["plain"] / before["seconds"]["speculative"])

    # What was exported untrained is judged as it was before the export; plain decoding is not done again.
    export_drafter(setup.build_drafter(frozen), frozen, tiny_target, config.export, setup.run_dir / "export", 3)
    after = evaluate_run(config, setup.run_dir, "after")
    assert after["overall"] == before["overall"] and after["domains"] == before["domains"]
    assert after["seconds"]["plain"] == before["seconds"]["plain"]


def test_in_bfloat16(config, setup):
    """Whoever has no room for float32; plain decoding is done again in it, whatever is kept of another precision."""
    reference, judged, margins = setup.run_dir / "evaluation" / "reference.json", {}, {}
    for dtype in ("float32", "bfloat16"):
        asked = replace(config, evaluate=replace(config.evaluate, dtype=dtype, max_prompts=3))
        judged[dtype] = evaluate_run(asked, setup.run_dir, "before")
        margins[dtype] = torch.tensor(json.loads(reference.read_text())["texts"][0]["margins"][:1])
    assert [(result["dtype"], result["way"]) for result in judged.values()] == [(d, "one cache") for d in judged]
    assert all(gap["logit_gap"] < 0.5 for gap in judged["bfloat16"]["mismatches"])
    assert 0 < (margins["float32"] - margins["bfloat16"]).abs() < 0.2


def test_a_stale_or_broken_reference_is_made_again(config, setup):
    reference = setup.run_dir / "evaluation" / "reference.json"
    first = evaluate_run(config, setup.run_dir, "before")
    kept = json.loads(reference.read_text())
    for text in (reference.read_text()[:-50], json.dumps({**kept, "key": "another", "texts": []})):
        reference.write_text(text)
        again = evaluate_run(config, setup.run_dir, "before")
        assert again["lossless"] and again["overall"] == first["overall"]
        assert json.loads(reference.read_text())["texts"] == kept["texts"]


def test_no_export(config, setup, tmp_path):
    with pytest.raises(UserError, match="not an exported drafter"):
        evaluate_run(config, tmp_path, "after")


def test_a_text_that_differs_is_reported(config, setup, tiny_target, frozen):
    """`lossless` is a comparison, not a promise: against another text it says where, and by what margin."""
    model, tokenizer = tiny_target.load_model(torch.float32), tiny_target.load_tokenizer()
    cfg = EvaluateConfig(max_new_tokens=12, draft_tokens=2, batch_size=3)
    rows = [_row(f"Please {verb} the boats.", id=verb, domain="verbs") for verb in ("count", "list")]
    prompts, _ = render_prompts(rows, tokenizer, 512)
    reference = decode_reference(model, prompts, cfg, [tokenizer.eos_token_id])
    reference.texts[1].tokens[5] += 1
    result = evaluate(model, tokenizer, setup.build_drafter(frozen), frozen, rows, cfg, reference)
    assert result["lossless"] is False
    (mismatch,) = result["mismatches"]
    assert mismatch["id"] == "list" and mismatch["domain"] == "verbs" and mismatch["position"] == 5
    assert mismatch["expected"] == mismatch["got"] + 1 and mismatch["logit_gap"] > 0.01
    json.dumps(result, allow_nan=False)


def test_prompts(tiny_target):
    tokenizer = tiny_target.load_tokenizer()
    good, answered = _row("Please count the boats.", id="a", domain="d"), _row("Please count the boats.")
    answered.data["messages"].append({"role": "assistant", "content": "One, two."})
    bad, long = Row({"id": "b"}, "file:3"), _row("boats " * 600, id="c")
    prompts, skipped = render_prompts([good, answered, bad, long], tokenizer, 512)
    assert [p.id for p in prompts] == ["a", "file:1"] and [p.domain for p in prompts] == ["d", "other"]
    assert prompts[0].tokens == prompts[1].tokens  # a given answer is not part of the prompt
    assert tokenizer.decode(prompts[0].tokens).endswith("<|im_start|>assistant\n")
    assert [s["id"] for s in skipped] == ["b", "c"]
    assert "no messages" in skipped[0]["reason"] and "context is 512" in skipped[1]["reason"]
    with pytest.raises(UserError, match="no prompt to evaluate on"):
        render_prompts([bad], tokenizer, 512)


def _row(question: str, **columns) -> Row:
    return Row({**columns, "messages": [{"role": "user", "content": question}]}, "file:1")
