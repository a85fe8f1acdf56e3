from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from data_pipelines.conversations.greedy import Greedy, agreement, generate
from data_pipelines.conversations.regenerate import Regenerated, regenerate
from data_pipelines.conversations.rendering import prompt_ids, render_documents
from data_pipelines.conversations.rows import Row, conversation, read_rows
from data_pipelines.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(tiny_target):
    return tiny_target.load_tokenizer()


@pytest.fixture(scope="module")
def model(tiny_target):
    return tiny_target.load_model(torch.float32)


def prompts(n: int) -> list[Row]:
    verbs = ["count", "describe", "compare", "list"]
    texts = [f"Please {verbs[i % 4]} the apples and the boats " + "and the dogs " * (i % 3) + str(i) for i in range(n)]
    return [Row({"id": f"p{i}", "messages": [{"role": "user", "content": t}]}, f"t:{i}") for i, t in enumerate(texts)]


def literal_greedy(model, ids: list[int], eos: int, most: int) -> list[int]:
    """Argmax after argmax, one prompt, no cache."""
    out = []
    with torch.inference_mode():
        while len(out) < most and (not out or out[-1] != eos):
            out.append(int(model(torch.tensor([ids + out])).logits[0, -1].argmax()))
    return out


@pytest.fixture
def answer(tiny_target):
    """answer(rows, out, max_new_tokens=…, batch_size=…): the tiny target answers."""

    def ask(rows: list[Row], out: Path, **options) -> Regenerated:
        return regenerate(lambda: rows, Greedy(tiny_target, **options), out)

    return ask


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_the_targets_own_greedy_ones(tmp_path, answer, model, tokenizer):
    rows = prompts(6)
    limit = 18  # some answers stop before it, others are cut
    result = answer(rows, tmp_path / "out.jsonl", max_new_tokens=limit, batch_size=4)
    written = lines(tmp_path / "out.jsonl")
    assert [w["id"] for w in written] == [r.data["id"] for r in rows]
    assert (result.rows, result.answered, result.resumed, result.refused) == (6, 6, 0, {})
    for line in written:
        expected = literal_greedy(model, prompt_ids(tokenizer, line["messages"][:-1]), tokenizer.eos_token_id, limit)
        stopped = expected[-1] == tokenizer.eos_token_id
        assert line["finish_reason"] == ("stop" if stopped else "length")
        assert line["messages"][-1]["content"] == tokenizer.decode(expected[: -1 if stopped else None])
    assert result.cut == sum(line["finish_reason"] == "length" for line in written)
    assert list(tmp_path.iterdir()) == [tmp_path / "out.jsonl"]


def test_a_cut_answer_is_rendered_without_an_end(tmp_path, answer, tokenizer):
    answer(prompts(2), tmp_path / "out.jsonl", max_new_tokens=5)
    for row in read_rows(str(tmp_path / "out.jsonl")):
        talk = conversation(row)
        ((ids, mask),) = render_documents(tokenizer, talk)
        assert talk.truncated and mask[-1] and tokenizer.eos_token_id not in ids[mask.index(True) :]


def test_the_models_own_generation_config_does_not_bend_the_answers(model, tokenizer):
    ids = [prompt_ids(tokenizer, prompts(1)[0].data["messages"])]
    plain = generate(ids, model, tokenizer, 12)
    config = model.generation_config
    config.repetition_penalty, config.do_sample, config.temperature = 5.0, True, 2.0
    try:
        assert generate(ids, model, tokenizer, 12) == plain
        assert model.generation_config is config
    finally:
        config.repetition_penalty, config.do_sample, config.temperature = None, None, None


def test_every_assistant_turn_is_answered_after_the_targets_own_history(tmp_path, answer, model, tokenizer):
    turns = [
        {"role": "user", "content": "Please count the apples"},
        {"role": "assistant", "content": "Somebody else's words"},
        {"role": "user", "content": "Please list the boats"},
        {"role": "assistant", "content": "More of them"},
    ]
    row = Row({"messages": turns}, "t:1")
    answer([row], tmp_path / "out.jsonl", max_new_tokens=64)
    (line,) = lines(tmp_path / "out.jsonl")
    assert [m["role"] for m in line["messages"]] == ["user", "assistant", "user", "assistant"]
    for turn in (1, 3):
        expected = literal_greedy(model, prompt_ids(tokenizer, line["messages"][:turn]), tokenizer.eos_token_id, 64)
        assert line["messages"][turn]["content"] == tokenizer.decode(expected[:-1])
    answer([row], tmp_path / "cut.jsonl", max_new_tokens=4)
    (line,) = lines(tmp_path / "cut.jsonl")
    assert len(line["messages"]) == 2 and line["finish_reason"] == "length"


def test_rows_that_cannot_be_prompted_stay_in_the_file_with_their_reason(tmp_path, answer):
    rows = [Row({"other": 1}, "t:1"), *prompts(1), Row("{", "t:3", "the line is not JSON")]
    result = answer(rows, tmp_path / "out.jsonl", max_new_tokens=4)
    no_messages = "the row has no messages, nor another known shape; its keys: other"
    assert result.refused == {no_messages: 1, "the line is not JSON": 1}
    assert result.answered + sum(result.refused.values()) == result.rows == len(lines(tmp_path / "out.jsonl"))
    first, _, last = read_rows(str(tmp_path / "out.jsonl"))
    for row, reason in ((first, "has no messages"), (last, "not JSON")):
        with pytest.raises(Exception, match=reason):
            conversation(row)
    with pytest.raises(UserError, match="no prompt can be answered"):
        answer(rows[:1], tmp_path / "none.jsonl", max_new_tokens=4)


def interrupt_after(batches: int, monkeypatch) -> None:
    real, done = Greedy._answer, []

    def answer(*arguments):
        if len(done) == batches:
            raise KeyboardInterrupt
        done.append(1)
        return real(*arguments)

    monkeypatch.setattr(Greedy, "_answer", answer)


@pytest.mark.faults
def test_killed_and_started_again_it_goes_on(tmp_path, tiny_target, monkeypatch):
    """A real process, killed by SIGKILL in the middle, its last line then left half-written; interrupted once more."""
    source, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row.data) + "\n" for row in prompts(60)))
    options = {"max_new_tokens": 40, "batch_size": 1}
    code = (
        "import sys, torch; from pathlib import Path; torch.set_num_threads(1)\n"
        "from data_pipelines.engines.targets import Target\n"
        "from data_pipelines.conversations.greedy import Greedy\n"
        "from data_pipelines.conversations.regenerate import regenerate\n"
        "from data_pipelines.conversations.rows import read_rows\n"
        f"greedy = Greedy(Target(sys.argv[1], 'tiny'), **{options})\n"
        "regenerate(lambda: read_rows(sys.argv[2]), greedy, Path(sys.argv[3]))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, tiny_target.path, str(source), str(out)], cwd=os.getcwd())

    def answer_file(out: Path) -> Regenerated:
        return regenerate(lambda: read_rows(str(source)), Greedy(tiny_target, **options), out)

    deadline = time.monotonic() + 60
    while True:
        partials = list(tmp_path.glob(".out.jsonl.*.partial"))
        if partials and partials[0].read_bytes().count(b"\n") >= 3:
            break
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    finished = partials[0].read_bytes().count(b"\n")
    with partials[0].open("ab") as file:
        file.write(b'{"index": 59, "line": {"id": "p5')

    interrupt_after(2, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        answer_file(out)
    monkeypatch.undo()
    resumed = answer_file(out)
    assert resumed.resumed == finished + 2 and resumed.answered == 58 - finished > 0
    undisturbed = tmp_path / "undisturbed.jsonl"
    assert answer_file(undisturbed).resumed == 0
    assert out.read_text() == undisturbed.read_text()
    assert not list(tmp_path.glob(".*"))


def test_a_partial_file_of_another_call_is_not_gone_on_with(tmp_path, answer, monkeypatch):
    interrupt_after(2, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        answer(prompts(4), tmp_path / "out.jsonl", max_new_tokens=4, batch_size=1)
    monkeypatch.undo()
    assert answer(prompts(4), tmp_path / "out.jsonl", max_new_tokens=5).resumed == 0
    assert answer(prompts(3), tmp_path / "out.jsonl", max_new_tokens=4).resumed == 0
    assert answer(prompts(4), tmp_path / "out.jsonl", max_new_tokens=4).resumed == 2


def test_agreement_counts_and_says_where_an_answer_differs(tmp_path, answer, model, tokenizer):
    answer(prompts(9), tmp_path / "out.jsonl", max_new_tokens=20, batch_size=4)
    rows = list(read_rows(str(tmp_path / "out.jsonl")))
    found = agreement(rows, model, tokenizer, 5, max_new_tokens=20, batch_size=2)
    assert (found.same, found.total, found.mismatches) == (5, 5, [])
    assert agreement(rows, model, tokenizer, 50, max_new_tokens=12).same == 9  # as far as both go
    messages = rows[0].data["messages"]
    words = messages[-1]["content"].split(" ")
    changed = " ".join([*words[:3], "mountain", *words[4:]])
    forged = Row({**rows[0].data, "messages": [messages[0], {"role": "assistant", "content": changed}]}, "t:0")
    found = agreement([forged, *rows[1:]], model, tokenizer, 9, max_new_tokens=20)
    assert (found.same, found.total) == (8, 9)
    ((name, index),) = found.mismatches
    assert name == "p0" and index == len(tokenizer.encode(" ".join(words[:3]), add_special_tokens=False))
