"""The ledger's HTTP side: who is let in, what is refused, what is shown."""

from __future__ import annotations

import contextlib
import threading
import time

import httpx
import pytest

from data_pipelines.errors import UserError
from data_pipelines.stores.config import StoreConfig
from data_pipelines.stream import StreamError
from data_pipelines.stream.client import LedgerClient
from data_pipelines.stream.ledger import Want
from data_pipelines.stream.messages import read_token
from data_pipelines.stream.server import MAX_REQUEST_BYTES

from .conftest import TOKEN, LedgerProcess


@pytest.fixture(scope="module")
def ledger(tmp_path_factory, spec):
    started = LedgerProcess(tmp_path_factory.mktemp("ledger"), StoreConfig("memory"), spec)
    yield started
    started.kill()


@pytest.fixture
def http(ledger):
    with httpx.Client(base_url=ledger.url, headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False) as client:
        yield client


POSTS = ["want", "locate", "lost", "consumed", "lease", "stored", "failed", "reconcile", "finish"]


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x"])
def test_nothing_is_told_or_done_without_the_token(ledger, header):
    headers = {} if header is None else {"Authorization": header}
    with httpx.Client(base_url=ledger.url, headers=headers, trust_env=False) as stranger:
        for path in POSTS:
            assert stranger.post(f"/{path}", json={}).status_code == 401
        for path in ("config", "status", "metrics"):
            assert stranger.get(f"/{path}").status_code == 401
        assert stranger.get("/health").json() == {"status": "ok"}
    assert not ledger.status()["finished"]


def test_a_wrong_token_is_the_persons_error(ledger):
    client = LedgerClient(ledger.url, "wrong")
    with pytest.raises(UserError, match="refused the token"):
        client.status()
    client.close()


def a_want(input_ids: list, lengths: list) -> dict:
    return {"wants": [{"index": 1, "pack": "p", "features": "f", "input_ids": input_ids, "lengths": lengths}]}


@pytest.mark.parametrize(
    "path, body, word",
    [
        ("want", {}, "wants"),
        ("want", {"wants": ["x"]}, "a want is an object"),
        ("want", a_want([1, "2"], [2]), "integers"),
        ("want", a_want([1, 2], [3]), "add up"),
        ("locate", {"want": 3}, "want"),
        ("lease", {"producer": "p", "features": "f", "wait": "long"}, "wait"),
        ("stored", {"producer": "p", "want": "w", "lease": "l", "size": True, "checksum": "c"}, "size"),
    ],
)
def test_what_is_not_understood_is_refused_with_the_reason(http, path, body, word):
    answer = http.post(f"/{path}", json=body)
    assert answer.status_code == 400 and word in answer.text


def test_a_request_that_is_no_json_or_too_large_is_refused(http):
    assert http.post("/want", content=b"{").status_code == 400
    assert http.post("/want", content=b"[1]").status_code == 400
    large = (b" " * 1024**2 for _ in range(MAX_REQUEST_BYTES // 1024**2 + 1))
    with contextlib.suppress(httpx.WriteError):  # when the server closes before everything is sent
        assert http.post("/want", content=large).status_code == 413
    assert http.get("/health").status_code == 200


def test_long_polls_end_by_themselves_and_early_when_there_is_news(ledger):
    client = ledger.client()
    began = time.monotonic()
    assert client.lease("poller", "features-of-nobody", wait=60) == (None, False)
    assert 1.5 < time.monotonic() - began < 5
    client.want([Want(0, "poll", "f1", [1], [1])])
    began = time.monotonic()
    lease, _ = client.lease("poller", "f1")
    assert lease.pack == "poll" and time.monotonic() - began < 1
    assert client.failed("poller", lease.want, lease.lease, "only a test")
    client.consumed(lease.want, "")
    client.close()


def test_status_and_metrics_show_the_stream(ledger, http):
    client = ledger.client()
    client.want([Want(5, "shown", "f2", [1, 2], [2])])
    lease, _ = client.lease("p", "f2")
    assert client.stored("p", lease.want, lease.lease, 1234, "sum")
    status = client.status()
    assert status["bytes_stored"] == 1234 and status["next_index"] == 5
    metrics = http.get("/metrics").text
    assert 'draftsmith_ledger_packs{state="stored"} 1.0' in metrics
    assert "draftsmith_ledger_stored_bytes 1234.0" in metrics
    assert 'draftsmith_producer_stored_total{producer="p"} 1.0' in metrics
    assert client.consumed(lease.want, lease.lease) == ""
    client.close()


def test_the_page_for_people_holds_no_data(http):
    page = httpx.get(http.base_url, trust_env=False)
    assert page.status_code == 200 and "<table" in page.text and TOKEN not in page.text


def test_configuration_is_what_a_producer_needs(ledger, spec):
    client = ledger.client()
    config = client.config()
    assert config["target"]["kind"] == "tiny" and config["spec"]["taps"] == list(spec.taps)
    assert config["instance"] == client.instance != ""
    client.close()


def test_a_port_that_is_taken_is_the_persons_error(ledger):
    from data_pipelines.stream.config import SourceConfig
    from data_pipelines.stream.server import serve

    port = int(ledger.url.rpartition(":")[2])
    with pytest.raises(UserError, match="cannot listen"):
        serve("127.0.0.1", port, TOKEN, {}, SourceConfig())


def test_something_else_at_the_address_is_noticed(ledger):
    with pytest.raises(UserError, match="http://host:port"):
        LedgerClient("127.0.0.1:80", TOKEN)
    client = LedgerClient(f"{ledger.url}/elsewhere", TOKEN)
    with pytest.raises(StreamError, match="404"):
        client.status()
    client.close()


def test_tokens_are_read_from_their_file(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_token(str(tmp_path / "none"))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(UserError, match="empty"):
        read_token(str(tmp_path / "empty"))
    (tmp_path / "token").write_text(" secret \n")
    assert read_token(str(tmp_path / "token")) == "secret"


def test_finish_reaches_a_waiting_producer(start_ledger):
    waiting, launcher = (ledger := start_ledger()).client(), ledger.client()
    threading.Timer(0.3, launcher.finish).start()
    began = time.monotonic()
    assert waiting.lease("p", "f") == (None, True)
    assert time.monotonic() - began < 1.5
    waiting.close()
    launcher.close()
