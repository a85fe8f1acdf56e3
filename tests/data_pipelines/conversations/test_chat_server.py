"""Regeneration through servers: a real one, one behind a network that fails, and scripted ones for single traits."""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from transformers import GenerationConfig

from data_pipelines.conversations import chat_server
from data_pipelines.conversations.chat_server import ChatServer, sampling
from data_pipelines.conversations.config import DataConfig, RegenerateConfig
from data_pipelines.conversations.greedy import Greedy
from data_pipelines.conversations.prepare import prepare
from data_pipelines.conversations.regenerate import Regenerated, regenerate
from data_pipelines.conversations.rendering import prompt_ids, render_documents
from data_pipelines.conversations.rows import Row, conversation, read_rows
from data_pipelines.errors import UserError

from .servers import FlakyProxy, Scripted, Served, TransformersServe, regenerate_in_process

LIMIT = 30  # tokens: the tiny target's answers are shorter or longer


@pytest.fixture(scope="module")
def real(tiny_target, tmp_path_factory) -> Iterator[TransformersServe]:
    started = TransformersServe(tiny_target.path, tmp_path_factory.mktemp("serve") / "serve.log")
    yield started
    started.stop()


@pytest.fixture(scope="module")
def tokenizer(tiny_target):
    return tiny_target.load_tokenizer()


@pytest.fixture
def serve(tokenizer) -> Iterator[Callable[..., tuple[Scripted, Served]]]:
    """serve(script) → (what it was asked, the server)."""
    started = []

    def start(script: Callable[[dict], Response | str], count=None) -> tuple[Scripted, Served]:
        scripted = Scripted(script, count or (lambda messages: len(prompt_ids(tokenizer, messages))))
        started.append(Served(scripted.app))
        return scripted, started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(autouse=True)
def no_long_pauses(monkeypatch) -> None:
    monkeypatch.setattr(chat_server, "_FIRST_PAUSE", 0.01)


def talks(n: int) -> list[Row]:
    """Conversations of one to three turns of the user; every third one brings answers, which are not the target's."""
    verbs = ["count", "describe", "compare", "list", "explain"]
    rows = []
    for i in range(n):
        messages = []
        for turn in range(1 + i % 3):
            if messages:
                messages.append({"role": "assistant", "content": "somebody else's answer"})
            messages.append({"role": "user", "content": f"Please {verbs[(i + turn) % 5]} the apples and the boats {i}"})
        rows.append(Row({"id": f"r{i}", "domain": "d", "messages": messages}, f"rows.jsonl:{i + 1}"))
    return rows


def ask(rows: list[Row], out: Path, target, url: str, **options) -> Regenerated:
    config = RegenerateConfig(
        server=url, **{"max_new_tokens": LIMIT, "concurrency": 4, "timeout_seconds": 60, **options}
    )
    return regenerate(lambda: rows, ChatServer(config, target), out)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# A real server


def test_a_real_server_gives_the_answers_that_the_target_gives_here(tmp_path, tiny_target, real, tokenizer) -> None:
    """A conversation is compared up to where this server tells less than the target wrote: it leaves special tokens out
    of its text, and takes an answer whose end is its last allowed token for a cut one. How often the tiny target writes
    such answers depends on the machine that trained it.
    """
    rows = talks(24)
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    done = ask(rows, tmp_path / "there.jsonl", tiny_target, real.url, model=tiny_target.path)
    regenerate(lambda: rows, Greedy(tiny_target, max_new_tokens=LIMIT, batch_size=1), tmp_path / "here.jsonl")
    whole, answers = 0, []
    for there, here in zip(lines(tmp_path / "there.jsonl"), lines(tmp_path / "here.jsonl"), strict=True):
        for theirs, ours in zip(there["messages"], here["messages"]):
            ids = ours.pop("token_ids", [])
            assert bool(ids) == (ours["role"] == "assistant")
            ends_at_limit = len(ids) == LIMIT and ids[-1] == tokenizer.eos_token_id
            if ids and (ends_at_limit or any(token in ours["content"] for token in special)):
                break
            assert theirs == ours
            answers += [ours["content"]] if ids else []
        else:
            assert there == here
            whole += 1
    assert whole and len(set(answers)) >= 3, (whole, answers)
    assert (done.rows, done.answered, done.resumed, done.refused) == (24, 24, 0, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here.jsonl", "there.jsonl"]


@pytest.mark.faults
def test_faults_on_the_way_change_nothing(tmp_path, tiny_target, real) -> None:
    rows = talks(30)
    ask(rows, tmp_path / "calm.jsonl", tiny_target, real.url, model=tiny_target.path)
    proxy = FlakyProxy(real.url, slow_seconds=8)
    server = Served(proxy.app)
    try:
        options = {"model": tiny_target.path, "timeout_seconds": 5, "max_attempts": 50}
        done = ask(rows, tmp_path / "rough.jsonl", tiny_target, server.url, **options)
    finally:
        server.stop()
    assert set(proxy.faults) == set(FlakyProxy.KINDS), "not all kinds of faults came up"
    assert (done.answered, done.refused) == (30, {})
    assert (tmp_path / "rough.jsonl").read_text() == (tmp_path / "calm.jsonl").read_text()


@pytest.mark.faults
def test_killed_ten_times_every_row_is_there_once(tmp_path, tiny_target, real) -> None:
    """Real processes, killed by SIGKILL at random points of their work, through a network that fails besides."""
    rows = talks(60)
    source, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row.data) + "\n" for row in rows))
    proxy = FlakyProxy(real.url, slow_seconds=1, seed=7)
    server = Served(proxy.app)
    processes = multiprocessing.get_context("forkserver")  # imports torch once, not in each of the processes
    processes.set_forkserver_preload([regenerate_in_process.__module__])
    options = {"server": server.url, "model": tiny_target.path, "max_new_tokens": LIMIT, "concurrency": 4}
    task = (tiny_target.path, str(source), str(out), {**options, "max_attempts": 99})
    moments, kills, written = random.Random(3), 0, 0
    try:
        while not out.exists():
            process = processes.Process(target=regenerate_in_process, args=task)
            process.start()
            if kills < 10:
                written = _wait_for_lines(tmp_path, written + moments.randrange(1, 4), process)
                time.sleep(moments.random() / 20)
                process.kill()
                kills += 1
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL)
    finally:
        server.stop()
    assert kills == 10
    undisturbed = tmp_path / "undisturbed.jsonl"
    read = [Row(row.data, f"{source}:{i}") for i, row in enumerate(rows, 1)]
    ask(read, undisturbed, tiny_target, real.url, model=tiny_target.path)
    assert [line["id"] for line in lines(out)] == [row.data["id"] for row in rows]
    assert out.read_text() == undisturbed.read_text()
    assert not list(tmp_path.glob(".*"))


def _wait_for_lines(folder: Path, number: int, process: BaseProcess) -> int:
    """Until the partial file has so many lines (some of them perhaps torn); how many it has then."""
    deadline = time.monotonic() + 120
    while True:
        found = sum(path.read_bytes().count(b"\n") for path in folder.glob(".out.jsonl.*.partial"))
        if found >= number:
            return found
        assert process.is_alive() and time.monotonic() < deadline, f"ended or stuck after {found} lines"
        time.sleep(0.002)


# What becomes of single rows


def test_what_fails_for_good_is_kept_with_its_reason_and_quarantined(tmp_path, tiny_target, tokenizer, serve) -> None:
    def script(body: dict) -> Response | str:
        text = body["messages"][-1]["content"]
        if text.endswith(" 3"):
            return PlainTextResponse("CUDA error", 500)
        if text.endswith((" 6", " 7")):
            return JSONResponse({"error": {"message": f"{len(text)}1 tokens are too many"}}, 400)
        return " " if text.endswith(" 9") else "fine"

    _, server = serve(script)
    rows = [Row(row.data | {"messages": row.data["messages"][-1:]}, row.origin) for row in talks(12)]
    done = ask(rows, tmp_path / "out.jsonl", tiny_target, server.url, max_attempts=3)
    written = lines(tmp_path / "out.jsonl")
    assert [line["id"] for line in written] == [row.data["id"] for row in rows]
    assert done.answered == 8 and done.answered + sum(done.refused.values()) == done.rows == 12
    reasons = {line["id"]: line["refused"] for line in written if "refused" in line}
    assert reasons["r3"] == "no answer after 3 attempts: it answers 500"
    assert reasons["r6"] == reasons["r7"] and "answers 400" in reasons["r6"] and "too many" in reasons["r6"]
    assert reasons["r9"] == "an answer is empty"
    config = DataConfig(path=str(tmp_path / "out.jsonl"), max_quarantined_fraction=0.5)
    prepared = prepare(config, tokenizer, tmp_path / "run")
    assert prepared.counts.reasons == done.refused and prepared.counts.trained == 8


def test_every_turn_follows_the_targets_own_answers(tmp_path, tiny_target, serve) -> None:
    scripted, server = serve(lambda body: f"answer {len(body['messages'])}")
    ask(talks(3)[2:], tmp_path / "out.jsonl", tiny_target, server.url)
    (line,) = lines(tmp_path / "out.jsonl")
    answers = [m["content"] for m in line["messages"] if m["role"] == "assistant"]
    assert answers == ["answer 1", "answer 3", "answer 5"]
    sent = [m["content"] for m in scripted.bodies[-1]["messages"] if m["role"] == "assistant"]
    assert sent == ["answer 1", "answer 3"]


def test_token_ids_are_kept_and_trained_on(tmp_path, tiny_target, tokenizer, serve) -> None:
    """A server that gives token ids as vLLM does, and cuts its answer into other tokens than the tokenizer would."""
    ids = [i for letter in "apples" for i in tokenizer.encode(letter)] + [tokenizer.eos_token_id]
    assert ids[:-1] != tokenizer.encode("apples")

    def script(body: dict) -> Response:
        assert body["return_token_ids"]
        message = {"role": "assistant", "content": "apples"}
        choice = {"message": message, "finish_reason": "stop", "token_ids": ids}
        return JSONResponse({"choices": [choice], "prompt_token_ids": prompt_ids(tokenizer, body["messages"])})

    _, server = serve(script)
    ask(talks(1), tmp_path / "out.jsonl", tiny_target, server.url)
    (row,) = read_rows(str(tmp_path / "out.jsonl"))
    assert row.data["messages"][-1]["token_ids"] == ids
    ((trained, mask),) = render_documents(tokenizer, conversation(row))
    assert [i for i, on in zip(trained, mask) if on] == ids


def test_tools_go_along_and_a_call_ends_the_row(tmp_path, tiny_target, serve) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}

    def script(body: dict) -> Response:
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return JSONResponse({"choices": [{"message": message, "finish_reason": "tool_calls"}]})

    scripted, server = serve(script)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    old = {"role": "assistant", "content": "", "tool_calls": [call]}
    turns = [{"role": "user", "content": "go"}, old, {"role": "tool", "content": "2", "tool_call_id": "c1"}]
    row = Row({"tools": tools, "messages": [*turns, {"role": "assistant", "content": "two"}]}, "t:1")
    ask([row], tmp_path / "out.jsonl", tiny_target, server.url)
    (line,) = lines(tmp_path / "out.jsonl")
    assert scripted.bodies[-1]["tools"] == tools
    assert [m["role"] for m in line["messages"]] == ["user", "assistant"]
    assert line["messages"][1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}


# The server as a whole


def test_a_server_that_goes_away_stops_the_run_which_then_goes_on(tmp_path, tiny_target, serve) -> None:
    answered = []

    def script(body: dict) -> str | Response:
        answered.append(body)
        return "fine" if len(answered) < 6 else PlainTextResponse("no more", 503)

    _, server = serve(script)
    rows, out = talks(12), tmp_path / "out.jsonl"
    with pytest.raises(UserError, match="has answered nothing for 1 s"):
        ask(rows, out, tiny_target, server.url, patience_seconds=1, concurrency=1)
    assert not out.exists()
    server.stop()
    with pytest.raises(UserError, match="cannot be reached"):
        ask(rows, out, tiny_target, server.url, patience_seconds=0.2)
    _, other = serve(lambda body: "fine")
    done = ask(rows, out, tiny_target, other.url)
    assert done.resumed > 0 and done.resumed + done.answered == 12 and done.refused == {}


def test_retry_after_is_waited_for(tmp_path, tiny_target, serve, monkeypatch) -> None:
    waited, refused = [], []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    def script(body: dict) -> str | Response:
        if len(refused) < 8:
            refused.append(body)
            return PlainTextResponse("later", 429, headers={"Retry-After": "7"} if len(refused) == 1 else {})
        return "fine"

    monkeypatch.setattr(chat_server, "sleep", sleep)
    _, server = serve(script)
    done = ask(talks(1), tmp_path / "out.jsonl", tiny_target, server.url, max_attempts=2)
    assert done.answered == 1, "to be told to come back later counts as no failure of the request"
    assert waited[0] == 7
    for k, pause in enumerate(waited[1:], 1):  # twice as long each time, with jitter
        assert 0.5 <= pause / (0.01 * 2**k) <= 1.5
    assert len(set(waited)) == 8


def test_another_model_or_template_is_noticed_before_anything_is_asked(tmp_path, tiny_target, serve) -> None:
    scripted, server = serve(lambda body: "fine", lambda messages: 3)
    with pytest.raises(UserError, match="not what the target's chat template gives: 3 tokens there"):
        ask(talks(4), tmp_path / "out.jsonl", tiny_target, server.url)
    assert len(scripted.bodies) == 1
    assert ask(talks(4), tmp_path / "out.jsonl", tiny_target, server.url, check_prompts=False).answered == 4


def test_the_key_is_sent_and_nowhere_else(tmp_path, tiny_target, serve, monkeypatch) -> None:
    scripted, server = serve(lambda body: "fine")
    (tmp_path / "key").write_text("sk-file\n")
    monkeypatch.setenv("MY_KEY", "sk-variable")
    for number, option in enumerate(({"api_key_file": str(tmp_path / "key")}, {"api_key_variable": "MY_KEY"})):
        ask(talks(1), tmp_path / f"out{number}.jsonl", tiny_target, server.url, **option)
    sent = [headers["authorization"] for headers in scripted.headers]
    assert sent == ["Bearer sk-file"] * 2 + ["Bearer sk-variable"] * 2
    assert "sk-" not in (tmp_path / "out0.jsonl").read_text()
    _, locked = serve(lambda body: PlainTextResponse("who are you", 401))
    with pytest.raises(UserError, match="401: who are you"):
        ask(talks(1), tmp_path / "out.jsonl", tiny_target, locked.url)
    for option in ({"api_key_file": str(tmp_path / "none")}, {"api_key_variable": "NO_SUCH_KEY"}):
        with pytest.raises(UserError, match="key"):
            ask(talks(1), tmp_path / "out.jsonl", tiny_target, server.url, **option)


def test_the_only_model_is_taken_and_its_name_sent(tmp_path, tiny_target, serve) -> None:
    scripted, server = serve(lambda body: "fine")
    ask(talks(1), tmp_path / "out.jsonl", tiny_target, server.url)
    assert {body["model"] for body in scripted.bodies} == {"the-target"}


def test_sampling_is_the_targets_own_unless_the_config_says_otherwise() -> None:
    own = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9)
    assert sampling(RegenerateConfig(), own) == {"temperature": 0.6, "top_p": 0.9}
    assert sampling(RegenerateConfig(temperature=0.0, top_p=1.0), own) == {"temperature": 0.0, "top_p": 1.0}
    assert sampling(RegenerateConfig(), GenerationConfig(do_sample=True)) == {"temperature": 1.0}
    assert sampling(RegenerateConfig(), GenerationConfig(temperature=0.6, top_p=0.9)) == {"temperature": 0.0}


def test_seeds_depend_on_the_row_and_the_turn_alone(tmp_path, tiny_target, serve) -> None:
    scripted, server = serve(lambda body: "fine")
    seeds = []
    for out, concurrency in (("one.jsonl", 1), ("other.jsonl", 8)):
        scripted.bodies.clear()
        ask(talks(6), tmp_path / out, tiny_target, server.url, temperature=0.7, concurrency=concurrency)
        seeds.append({json.dumps(body["messages"]): body["seed"] for body in scripted.bodies if "seed" in body})
    assert seeds[0] == seeds[1] and len(set(seeds[0].values())) == 12


def test_one_process_at_a_time(tmp_path, tiny_target, serve) -> None:
    rows, errors = talks(2), []

    def script(body: dict) -> str:
        if not errors:
            errors.append(None)
            with pytest.raises(UserError, match="another process") as caught:
                ask(rows, tmp_path / "out.jsonl", tiny_target, server.url)
            errors.append(caught.value)
        return "fine"

    _, server = serve(script)
    assert ask(rows, tmp_path / "out.jsonl", tiny_target, server.url, concurrency=1).answered == 2
    assert len(errors) == 2


@pytest.mark.parametrize(
    "option", [{"server": "host:1"}, {"concurrency": 0}, {"api_key_file": "a", "api_key_variable": "b"}]
)
def test_options_that_make_no_sense_are_refused(option) -> None:
    with pytest.raises(UserError, match=r"data\.regenerate"):
        RegenerateConfig(**option)
