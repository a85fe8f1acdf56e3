"""The ledger's HTTP side against requests that nobody would send: the real application, any JSON, any bytes."""

from __future__ import annotations

import asyncio
import json
import math
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines.stream import messages, server
from data_pipelines.stream.ledger import Ledger
from data_pipelines.stream.server import LedgerServer
from data_pipelines.stream.wants import FAILED, LEASED, STORED, WANTED, pack_ids

TOKEN = "a-token"
WINDOW = 100
IDS = b64encode(pack_ids([1, 2])).decode()
WANT = {"session": "s", "index": 0, "pack": "p", "features": "f", "bytes": 9, "input_ids": IDS, "lengths": [2]}
ANSWER = {"want": "s-0-p", "lease": "l"}
VALID: dict[str, dict[str, Any]] = {
    "want": {"wants": [WANT]},
    "locate": {"want": "s-0-p", "wait": 0},
    "lost": {**ANSWER, "reason": "r", "removed": False},
    "consumed": {**ANSWER, "removed": True},
    "report": {
        "rank": 0, "world_size": 1, "host": "h", "pid": 1, "session": "s", "step": 1, "total_steps": 2,
        "wait_fraction": 0.5, "rows": [{"step": 1, "loss": 1.0, "wait_seconds": 0, "seconds": 1, "tokens": 5}],
    },
    "lease": {
        "producer": "a", "features": "f", "wait": 0,
        "about": {"host": "h", "pid": 1, "capacity": 50, "compute_seconds": 1, "put_seconds": 1, "idle_seconds": 1.5},
    },
    "stored": {**ANSWER, "producer": "a", "size": 9, "checksum": "c"},
    "failed": {**ANSWER, "producer": "a", "reason": "r"},
    "reconcile": {"producer": "a", "keys": ["k"]},
    "finish": {},
}  # fmt: skip


@pytest.fixture(autouse=True)
def short_polls(monkeypatch):
    monkeypatch.setattr(server, "MAX_WAIT_SECONDS", 0.001)


Post = Callable[[str, bytes], Awaitable[httpx.Response]]


def with_a_ledger(talk: Callable[[Post], Awaitable[None]], lease_seconds: float = 60.0) -> Ledger:
    """Let `talk` post to a new ledger's application, which must never raise; check the ledger afterwards."""
    ledger = Ledger(lease_seconds=lease_seconds, max_attempts=3, clock=time.monotonic, window_bytes=WINDOW)

    async def run() -> None:
        transport = httpx.ASGITransport(LedgerServer(ledger, TOKEN, {}).app)  # an exception in it is raised here
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://ledger", headers=headers) as http:

            async def post(path: str, content: bytes) -> httpx.Response:
                answer = await http.post(f"/{path}", content=content)
                assert answer.status_code in (200, 400, 409, 413), answer.text
                return answer

            await talk(post)
            for path in ("status", "metrics"):
                assert (await http.get(f"/{path}")).status_code == 200

    asyncio.run(run())
    check(ledger)
    return ledger


def check(ledger: Ledger) -> None:
    """What is true of every ledger. It looks inside: the numbers that are kept must be those that are."""
    entries = list(ledger._entries.values())
    leased = [e for e in entries if e.state == LEASED]
    assert {e.state for e in entries} <= {WANTED, LEASED, STORED, FAILED}
    assert {e.producer: id(e) for e in leased} == {name: id(e) for name, e in ledger._leases.items()}
    window = ledger.window()
    assert window["used"] == sum(e.room for e in entries)
    assert all((e.room > 0 or e.state == STORED) if e.state in (LEASED, STORED) else e.room == 0 for e in entries)
    assert window["used"] + window["garbage"] <= WINDOW and window["garbage"] >= 0
    assert all(len(e.reasons) <= 3 for e in entries)
    assert {e.want.session for e in entries} <= {ledger.session}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(2**70) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


paths = st.sampled_from(sorted(VALID))


def fields_of(value: Any, at: tuple = ()) -> list[tuple]:
    """The places of all values in a JSON value, the value itself included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    return [at, *(place for key, part in items for place in fields_of(part, (*at, key)))]


def replaced(value: Any, at: tuple, new: Any) -> Any:
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = replaced(value[at[0]], at[1:], new)
    return copy


@st.composite
def nearly_valid(draw) -> tuple[str, bytes]:
    """A right request with one value that is something else."""
    path = draw(paths)
    place = draw(st.sampled_from(fields_of(VALID[path])))
    return path, json.dumps(replaced(VALID[path], place, draw(json_values))).encode()


@st.composite
def valid(draw) -> tuple[str, bytes]:
    """A right request, about one of few packs."""
    path = draw(paths.filter(lambda path: path != "finish"))
    session, index, size = draw(st.sampled_from("st")), draw(st.integers(0, 3)), draw(st.sampled_from([9, 60, 101]))
    body = dict(VALID[path])
    if path == "want":
        body["wants"] = [{**WANT, "session": session, "index": index, "bytes": size}]
    body |= {"want": f"{session}-{index}-p"} if "want" in body else {}
    body |= {"producer": draw(st.sampled_from("ab"))} if "producer" in body else {}
    body |= {"session": session} if "session" in body else {}
    body |= {"size": size} if "size" in body else {}
    return path, json.dumps(body).encode()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(
        nearly_valid() | valid() | st.tuples(paths, st.binary(max_size=200) | json_values.map(encoded)), max_size=6
    )
)
def test_whatever_is_posted_is_answered_and_the_ledger_stays_sound(requests):
    async def talk(post: Post) -> None:
        for path, content in requests:
            await post(path, content)

    with_a_ledger(talk)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(valid() | st.just(("use the lease", b"")), max_size=40))
def test_right_requests_in_any_order_leave_the_ledger_sound(requests):
    """The leases that were given are answered, too, by whoever."""

    async def talk(post: Post) -> None:
        leases = ["l"]
        for number, (path, content) in enumerate(requests):
            if path == "use the lease":
                path, content = "stored", json.dumps(VALID["stored"]).encode()
            if path in ("stored", "failed", "lost", "consumed"):
                body = {**json.loads(content), "lease": leases[number % len(leases)]}
                lease = next((entry for entry in leases if entry != "l" and number % 2), None)
                content = json.dumps({**body, "lease": lease or body["lease"]}).encode()
            answer = await post(path, content)
            assert answer.status_code in (200, 409)
            if path == "lease" and answer.json()["lease"]:
                leases = [answer.json()["lease"]["lease"], *leases][:3]

    with_a_ledger(talk)


def numbers() -> list[Any]:
    return [-1, 2**63, 10**400, -(10**400), True, "1", None, [], {}, 0.5, math.nan, math.inf, -math.inf]


def takes(annotation: str) -> list[tuple[str, tuple]]:
    return [
        (path, place)
        for path, body in VALID.items()
        for place in fields_of(body)
        if place and type(_at(body, place)).__name__ in annotation.split("|")
    ]


def _at(value: Any, place: tuple) -> Any:
    for key in place:
        value = value[key]
    return value


_MAY_BE_NULL = ("loss", "wait_fraction", "wait_seconds", "seconds", "tokens")
_MAY_BE_FRACTIONS = (*_MAY_BE_NULL, "wait", "compute_seconds", "put_seconds", "idle_seconds")


@pytest.mark.parametrize("path, place", takes("int|float"), ids=lambda part: str(part))
def test_a_number_that_is_none_or_out_of_range_is_refused(path, place):
    name = place[-1]

    async def talk(post: Post) -> None:
        for number in numbers():
            if (number is None and name in _MAY_BE_NULL) or (number == 0.5 and name in _MAY_BE_FRACTIONS):
                continue
            if isinstance(number, int) and name in _MAY_BE_FRACTIONS and number not in (True, 10**400, -(10**400)):
                continue
            answer = await post(path, json.dumps(replaced(VALID[path], place, number)).encode())
            assert answer.status_code == 400, f"{name}={number!r:.20} was accepted"
            assert str(name) in answer.text or "JSON" in answer.text

    with_a_ledger(talk)


@pytest.mark.parametrize("name", ["wait", "compute_seconds", "put_seconds", "idle_seconds"])
def test_no_time_is_negative(name):
    path = "lease"
    body = VALID[path] | {"wait": -0.1} if name == "wait" else {**VALID[path], "about": {name: -0.1}}

    async def talk(post: Post) -> None:
        assert (await post(path, json.dumps(body).encode())).status_code == 400

    with_a_ledger(talk)


@pytest.mark.parametrize("path, place", takes("str|list|dict|bool"), ids=lambda part: str(part))
def test_anything_of_another_kind_is_refused(path, place):
    async def talk(post: Post) -> None:
        right = _at(VALID[path], place)
        for value in (3, 1.5, "x", None, [None], [[]], {"a": 1}, True, "\ud800", "x" * (messages.MAX_TEXT + 1)):
            if type(value) is type(right) and value in ("x", True):
                continue
            if isinstance(right, dict) and isinstance(value, dict):
                continue
            answer = await post(path, json.dumps(replaced(VALID[path], place, value)).encode())
            assert answer.status_code == 400, f"{place}={value!r:.20} was accepted"

    with_a_ledger(talk)


@pytest.mark.parametrize(
    "wants, word",
    [
        ([{**WANT, "lengths": [3]}], "add up"),
        ([{**WANT, "lengths": [0, 2]}], "lengths"),
        ([{**WANT, "lengths": []}], "add up"),
        ([{**WANT, "input_ids": b64encode(pack_ids([1, -1])).decode()}], "input_ids"),
        ([WANT, {**WANT, "session": "t"}], "several sessions"),
        ([{k: v for k, v in WANT.items() if k != "bytes"}], "bytes"),
    ],
)
def test_wants_that_make_no_sense_are_refused_with_the_reason(wants, word):
    async def talk(post: Post) -> None:
        answer = await post("want", json.dumps({"wants": wants}).encode())
        assert answer.status_code == 400 and word in answer.text

    assert with_a_ledger(talk).snapshot()["totals"]["wanted"] == 0


def test_deep_nesting_and_huge_numbers_are_refused():
    async def talk(post: Post) -> None:
        for content in (
            b"[" * 100_000,
            b'{"wants":' * 50_000,
            b'{"want": "s", "wait": ' + b"9" * 100_000 + b"}",
            b"\xff\xfe",
        ):
            for path in VALID:
                assert (await post(path, content)).status_code == 400

    with_a_ledger(talk)
