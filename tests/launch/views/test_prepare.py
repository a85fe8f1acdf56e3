"""`draftsmith prepare` says what it will do and what became of the rows; its numbers add up."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from launch.cli import main
from launch.views.prepare import _histogram

USER = {"role": "user", "content": "Please count the apples"}
CHAT = {"messages": [USER, {"role": "assistant", "content": "Here are one two three " * 8}]}


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch) -> list[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = [CHAT] * 30 + [{"text": "one two three"}] * 6 + [{"title": "?"}] * 3 + [{"messages": []}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    limits = [
        "data.pack_tokens=64",
        "data.max_document_tokens=32",
        "data.too_long=split",
        "drafter.draft_vocab_size=100",
    ]
    return ["ci_eagle3", f"data.path={path}", f"run_dir={tmp_path / 'run'}", "data.regenerate.mode=never", *limits]


def test_the_summary_adds_up(arguments, capsys):
    assert main(["prepare", *arguments]) == 0
    said = capsys.readouterr().out
    assert main(["prepare", "--json", *arguments]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert "rows         40 = 36 trained on + 4 quarantined" in said
    assert "30 messages, 6 text" in said or "6 text, 30 messages" in said
    assert re.search(
        r"quarantined  3 × .* keys: title \(first: .*rows\.jsonl:37\)\n +1 × the conversation is empty", said
    )
    lengths = [int(n.replace(",", "")) for n in re.findall(r"≤ +\d+  █+ +(\d[\d,]*)\n", said)]
    assert sum(lengths) == counts["documents"] > 36 and counts["split"] == 30
    assert f"{counts['packs']:,} of 64 tokens" in said and "of their room unused" in said
    assert re.search(r"100 of \d+ tokens cover \d\d\d?\.\d\d% of the labels", said)
    assert counts["trained"] + counts["quarantined"] == counts["rows"] == 40


def test_every_document_is_in_one_class_of_the_histogram():
    lengths = np.array([1, 2, 2, 3, 4, 5, 64, 65, 1000])
    shown = [re.match(r"≤ +([\d,]+)  (█*) *(\d+)$", line).groups() for line in _histogram(lengths)]
    counted = {int(most.replace(",", "")): int(n) for most, _, n in shown}
    assert counted == {1: 1, 2: 2, 4: 2, 8: 1, 16: 0, 32: 0, 64: 1, 128: 1, 256: 0, 512: 0, 1024: 1}
    assert all(bool(bar) == (n != "0") for _, bar, n in shown)
