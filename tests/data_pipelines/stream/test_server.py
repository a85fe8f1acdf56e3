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
from data_pipelines.stream.config import SourceConfig
from data_pipelines.stream.messages import read_token
from data_pipelines.stream.server import MAX_REQUEST_BYTES, serve
from data_pipelines.stream.wants import UNKNOWN, Want, pack_ids

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


POSTS = ["want", "locate", "lost", "consumed", "report", "lease", "stored", "failed", "reconcile", "finish"]


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
    client.want([Want("s", 0, "poll", "f1", 10, pack_ids([1]), [1])])
    began = time.monotonic()
    lease, _ = client.lease("poller", "f1")
    assert lease.pack == "poll" and time.monotonic() - began < 1
    assert client.failed("poller", lease.want, lease.lease, "only a test")
    client.consumed(lease.want, "")
    client.close()


def test_status_and_metrics_show_the_stream(ledger, http):
    client = ledger.client()
    client.want([Want("s", 5, "shown", "f2", 2000, pack_ids([1, 2]), [2])])
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


def test_a_newer_trainer_takes_over_and_the_older_one_is_told(ledger):
    old, new = ledger.client(), ledger.client()
    old.want([Want("old", 0, "taken", "f3", 10, pack_ids([1]), [1])])
    lease, _ = new.lease("p3", "f3")
    new.want([Want("new", 0, "taken", "f3", 10, pack_ids([1]), [1])])
    assert new.instance != old.instance
    with pytest.raises(StreamError, match="a newer trainer has taken over"):
        old.want([Want("old", 1, "taken", "f3", 10, pack_ids([1]), [1])])
    assert old.locate(lease.want).state == UNKNOWN
    assert not new.stored("p3", lease.want, lease.lease, 10, "sum")
    lease, _ = new.lease("p3", "f3")
    assert lease.want == "new-0-taken" and new.asked_to_reconcile
    assert new.reconcile("p3", []) == set()
    assert new.lease("p3", "f3")[0].lease == lease.lease and not new.asked_to_reconcile
    assert new.stored("p3", lease.want, lease.lease, 10, "sum")
    assert new.consumed(lease.want, lease.lease) == ""
    old.close()
    new.close()


def test_ranks_report_how_they_stand(ledger, http):
    client = ledger.client()
    client.want([Want("shown", 0, "p", "f4", 10, pack_ids([1]), [1])])
    row = {"step": 1, "loss": float("nan"), "expected_length": 1.5, "wait_seconds": 1, "seconds": 4, "tokens": 8}
    report = {"rank": 1, "world_size": 2, "host": "h", "pid": 5, "session": "shown", "step": 1, "total_steps": 9}
    assert client.report({**report, "wait_fraction": 0.25, "rows": [row]}) == client.status()["instance"]
    status = client.status()
    [rank] = status["ranks"]
    assert (rank["rank"], rank["step"], rank["total_steps"], rank["wait_fraction"]) == (1, 1, 9, 0.25)
    assert rank["seen"] < 60
    assert status["curve"] == [
        {"step": 1, "loss": None, "expected_length": 1.5, "wait_fraction": 0.25, "tokens_per_second": 2.0}
    ]
    metrics = http.get("/metrics").text
    assert 'draftsmith_rank_wait_fraction{rank="1"} 0.25' in metrics
    assert "draftsmith_ledger_window_limit_bytes" in metrics and "draftsmith_ledger_bytes_per_second" in metrics
    client.close()


def test_a_report_to_a_ledger_that_is_away_fails_at_once():
    client = LedgerClient("http://127.0.0.1:9", TOKEN)
    with pytest.raises(StreamError, match="not answered for 0 s"):
        client.report({})
    client.close()


def test_a_producer_says_how_it_spends_its_time(ledger, http):
    client = ledger.client()
    about = {"host": "h", "pid": 3, "capacity": 100, "compute_seconds": 2.5, "put_seconds": 1, "idle_seconds": 4}
    client.lease("busy", "f5", wait=0, about=about)
    [shown] = [p for p in client.status()["producers"] if p["name"] == "busy"]
    assert about.items() <= shown.items() and shown["lease_age"] is None
    metrics = http.get("/metrics").text
    assert 'draftsmith_producer_idle_seconds_total{producer="busy"} 4.0' in metrics
    assert 'draftsmith_producer_lent_bytes{producer="busy"} 100.0' in metrics
    client.close()


def test_methods_and_paths_that_are_not_there(http):
    for path in POSTS:
        assert http.get(f"/{path}").status_code == 405
    assert http.post("/status").status_code == 405
    assert http.get("/elsewhere").status_code == 404


def test_reasons_are_cut_and_made_sendable(ledger):
    client = ledger.client()
    client.want([Want("shown", 3, "odd", "f6", 10, pack_ids([1]), [1])])
    lease, _ = client.lease("p6", "f6")
    assert client.failed("p6", lease.want, lease.lease, "no such file: \udcff" + "x" * 100_000)
    assert "no such file: ?" in client.locate(lease.want).reasons[0]
    client.consumed(lease.want, "")
    client.close()


@pytest.mark.parametrize("cert, key", [("cert.pem", ""), ("missing.pem", "missing.pem")])
def test_tls_that_cannot_work_is_the_persons_error(cert, key):
    with pytest.raises(UserError, match="certificate"):
        serve("127.0.0.1", 0, TOKEN, {}, SourceConfig(), tls_cert=cert, tls_key=key)
    with pytest.raises(UserError, match="certificate cannot be read"):
        LedgerClient("https://127.0.0.1:1", TOKEN, ca_file="missing.pem")


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
