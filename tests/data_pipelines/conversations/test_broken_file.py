"""A file of which one row in five is broken, each in another way."""

from __future__ import annotations

import json
import re

import pytest

from launch.cli import main
from tests.data_pipelines.conversations.nasty_rows import HELLO, HI, PARIS, answer, call, talk, turn, user


def line(row: object) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")


GOOD = line(talk(HI, answer("one two three")))
# The broken line, and words of the reason that has to be given.
BROKEN: list[tuple[bytes, str]] = [
    (b'{"messages": [{"role": "user", "con', "not JSON"),
    (b"[1, 2]", "not a JSON object"),
    (b"null", "not a JSON object"),
    (b"\x00\x01\x02", "not JSON"),
    (GOOD[:-20] + "é".encode()[:1] + b'"}]}', "not UTF-8"),
    (b"[" * 200_000, "nested|not JSON"),
    (b'{"messages": ' + b"9" * 5000 + b"}", "digits|not JSON|not a list"),
    (line({"note": "nothing to train on"}), "no messages"),
    (line({"messages": "Hi"}), "not a list"),
    (line({"messages": {"role": "user"}}), "not a list"),
    (line(talk()), "empty"),
    (line(talk({"role": "user"})), "no text"),
    (line({"messages": ["Hi", "Hello"]}), "not an object"),
    (line(talk(HI, turn("critic", "Bad"))), "unknown role"),
    (line(talk(HI)), "no assistant turn"),
    (line(talk(HELLO, HI, HELLO)), "starts with an assistant"),
    (line(talk(HI, answer(""))), "an answer is empty"),
    (line(talk(HI, answer(3.5))), "no text"),
    (line(talk(HI, answer("bad \ud83d"))), "surrogate|UTF-8"),
    (line(talk(user([{"type": "image_url", "image_url": {}}]), HELLO)), "not text"),
    (line(talk(HI, answer("word " * 400))), "longer than"),
    (line(talk(user("Hi<|im_end|>"), HELLO)), "special token"),
    (line(talk(HI, answer(None, tool_calls=[call("{")]))), "arguments"),
    (line(talk(HI, answer(None, tool_calls=[call(PARIS)]), answer("Sunny"))), "leaves out tool calls"),
    (line(talk(HI, answer("one", reasoning_content="I count."))), "leaves out the reasoning"),
    (line(talk(HI, answer("one", token_ids=[10**6]))), "outside the tokenizer's vocabulary"),
    (line({"input_ids": [1, 10**6, 2], "loss_mask": [0, 1, 1]}), "outside|vocabulary"),
    (line({"input_ids": [1, 2, 3], "loss_mask": [0, 1]}), "loss_mask"),
    (line({"request": {"messages": [HI]}, "response": {"status_code": 500}}), "status 500"),
    (b'{"messages": [], "messages": [{"role": "user"', "not JSON"),
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_one_broken_row_in_five(tmp_path, capsys):
    lines, at = [], {}
    for broken, reason in BROKEN:
        lines += [GOOD, GOOD, broken, GOOD, GOOD]
        at[f"rows.jsonl:{len(lines) - 2}"] = reason
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
    recipe = ["ci_eagle3", "data.path=rows.jsonl", "data.regenerate.mode=never", f"run_dir={tmp_path / 'run'}"]
    limits = ["data.pack_tokens=256", "data.max_document_tokens=256", "data.too_long=quarantine"]
    assert main(["prepare", "--json", *recipe, *limits, "data.max_quarantined_fraction=0.2"]) == 0
    printed = capsys.readouterr().out
    counts = json.loads(printed[printed.index("{\n") :])

    assert counts["rows"] == len(lines) == 5 * len(BROKEN)
    assert counts["trained"] == counts["documents"] == 4 * len(BROKEN)
    assert counts["quarantined"] == sum(counts["reasons"].values()) == len(BROKEN)
    assert counts["trained"] + counts["quarantined"] == counts["rows"]
    written = [json.loads(text) for text in (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()]
    assert [row["origin"] for row in written] == list(at)
    for row in written:
        assert re.search(at[row["origin"]], row["reason"]), row
        assert "unforeseen" not in row["reason"]

    assert main(["prepare", "--json", *recipe, *limits, "data.max_quarantined_fraction=0.19"]) == 2
    said = capsys.readouterr().err
    assert f"{len(BROKEN)} of {len(lines)} rows are quarantined" in said and re.search(r"first: rows.jsonl:\d+", said)


def test_of_two_keys_of_one_name_the_last_counts(tmp_path, capsys):
    """As for every usual reader of JSON."""
    twice = b'{"messages": [], ' + GOOD[1:]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join([GOOD] * 40 + [twice]))
    recipe = ["ci_eagle3", "data.path=rows.jsonl", "data.regenerate.mode=never", f"run_dir={tmp_path / 'run'}"]
    assert main(["prepare", "--json", *recipe, "data.pack_tokens=256", "data.max_document_tokens=256"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed[printed.index("{\n") :])["trained"] == 41
