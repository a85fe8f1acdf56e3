"""The ledger over HTTP: JSON, a bearer token, long polling, metrics, a status page.

    POST /want /locate /lost /consumed     trainer ranks        GET /status /metrics   numbers (token)
    POST /lease /stored /failed /reconcile producers            GET /health /          no token, no data
    POST /finish                           the launcher         GET /config            what a producer needs

One event loop owns the ledger, so nothing is locked. By hand: `python -m data_pipelines.stream.server --help`.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ..errors import UserError
from ..stores.filesystem import write_atomically
from .config import SourceConfig
from .ledger import FAILED, STORED, UNKNOWN, Lease, Ledger, Location, Want
from .messages import MAX_WAIT_SECONDS, read_token
from .status_page import STATUS_PAGE

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 32 * 1024**2


class BadRequest(Exception):
    """A request that is answered with `status` and the message."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class LedgerServer:
    """The ASGI application around one ledger. config: the answer to `GET /config`."""

    def __init__(self, ledger: Ledger, token: str, config: dict[str, Any]):
        if not token:
            raise UserError("the ledger has no token; it would obey anybody")
        self.ledger, self._token, self._config = ledger, token.encode(), config
        self._changed = asyncio.Event()
        self._metrics = CollectorRegistry()
        self._metrics.register(_LedgerCollector(ledger))
        posts = {
            "want": self._want, "locate": self._locate, "lost": self._lost, "consumed": self._consumed,
            "lease": self._lease, "stored": self._stored, "failed": self._failed, "reconcile": self._reconcile,
            "finish": self._finish,
        }  # fmt: skip
        routes = [Route(f"/{name}", self._post(handler), methods=["POST"]) for name, handler in posts.items()]
        routes += [
            Route("/config", self._get(lambda: JSONResponse({**self._config, "instance": ledger.instance}))),
            Route("/status", self._get(lambda: JSONResponse(ledger.snapshot()))),
            Route("/metrics", self._get(self._render_metrics)),
            Route("/health", lambda request: JSONResponse({"status": "ok"})),
            Route("/", lambda request: HTMLResponse(STATUS_PAGE)),
        ]
        self.app = Starlette(routes=routes)

    # Requests

    async def _want(self, body: dict[str, Any], request: Request) -> dict[str, Any]:
        wants = [_parse_want(item) for item in _field(body, "wants", list)]
        self.ledger.want(wants)
        return {}

    async def _locate(self, body: dict[str, Any], request: Request) -> dict[str, Any]:
        want = _field(body, "want", str)

        def poll() -> Location | None:
            location = self.ledger.locate(want)
            return location if location.state in (STORED, FAILED, UNKNOWN) else None

        location = await self._until(poll, body, request)
        return asdict(location or self.ledger.locate(want))

    async def _lost(self, body: dict[str, Any], request: Request) -> dict[str, Any]:
        want, reason = _field(body, "want", str), _field(body, "reason", str)
        log.warning("lost %s: %s", want, reason)
        return {"accepted": self.ledger.lost(want, _field(body, "lease", str), reason)}

    async def _consumed(self, body: dict[str, Any], request: Request) -> dict[str, Any]:
        return {"remove": self.ledger.consumed(_field(body, "want", str), _field(body, "lease", str))}

    async def _lease(self, body: dict[str, Any], request: Request) -> dict[str, Any]:
        producer, features = _field(body, "producer", str), _field(body, "features", str)

        def poll() -> Lease | bool | None:
            return self.ledger.finished or self.ledger.lease(producer, features)

        answer = await self._until(poll, body, request)
        lease = asdict(answer) if isinstance(answer, Lease) else None
        return {"lease": lease, "finished": self.ledger.finished}

    async def _stored(self, body: dict[str, Any], request: Request) -> dict[str, Any]:
        accepted = self.ledger.stored(
            _field(body, "producer", str), _field(body, "want", str), _field(body, "lease", str),
            _field(body, "size", int), _field(body, "checksum", str),
        )  # fmt: skip
        return {"accepted": accepted}

    async def _failed(self, body: dict[str, Any], request: Request) -> dict[str, Any]:
        producer, want, reason = (_field(body, name, str) for name in ("producer", "want", "reason"))
        log.warning("%s failed on %s: %s", producer, want, reason)
        return {"accepted": self.ledger.failed(producer, want, _field(body, "lease", str), reason)}

    async def _reconcile(self, body: dict[str, Any], request: Request) -> dict[str, Any]:
        return {"keep": self.ledger.still_needed(_field(body, "keys", list))}

    async def _finish(self, body: dict[str, Any], request: Request) -> dict[str, Any]:
        self.ledger.finish()
        return {}

    def _render_metrics(self) -> Response:
        return Response(generate_latest(self._metrics), media_type=CONTENT_TYPE_LATEST)

    # Their common part

    def _get(self, render: Callable[[], Response]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            return render() if self._authorized(request) else _refused()

        return endpoint

    def _post(
        self, handler: Callable[[dict[str, Any], Request], Awaitable[dict[str, Any]]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            if not self._authorized(request):
                return _refused()
            try:
                answer = await handler(await _read_json(request), request)
            except BadRequest as error:
                return PlainTextResponse(str(error), error.status)
            if "locate" not in request.url.path:  # everything else may have changed what somebody waits for
                self._notify()
            return JSONResponse({**answer, "instance": self.ledger.instance})

        return endpoint

    def _authorized(self, request: Request) -> bool:
        given = request.headers.get("authorization", "").encode("utf-8", "replace")
        return hmac.compare_digest(given, b"Bearer " + self._token)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, poll: Callable[[], Any], body: dict[str, Any], request: Request) -> Any:
        """The first answer of `poll` that is not None (or False), or None after the caller's `wait` (bounded) seconds.

        A caller that has gone away gets nothing: a lease handed to it would be an attempt wasted.
        """
        wait = min(_field(body, "wait", (int, float), default=0.0), MAX_WAIT_SECONDS)
        deadline = time.monotonic() + wait
        while True:
            changed = self._changed
            if answer := poll():
                return answer
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            try:
                await asyncio.wait_for(changed.wait(), left)
            except TimeoutError:
                continue
            if await request.is_disconnected():
                return None


class _LedgerCollector:
    """The ledger's snapshot as Prometheus metrics, taken when they are asked for."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger

    def collect(self) -> Iterator[Metric]:
        snapshot = self._ledger.snapshot()
        packs = GaugeMetricFamily("draftsmith_ledger_packs", "Packs in the window, by state", labels=["state"])
        for state, count in snapshot["packs"].items():
            packs.add_metric([state], count)
        yield packs
        yield GaugeMetricFamily(
            "draftsmith_ledger_stored_bytes", "Bytes in the store that are not consumed yet", snapshot["bytes_stored"]
        )
        for name, total in snapshot["totals"].items():
            yield CounterMetricFamily(f"draftsmith_ledger_{name}", f"Since the ledger started: {name}", total)
        seen = GaugeMetricFamily("draftsmith_producer_seen_seconds", "Since the last call", labels=["producer"])
        stored = CounterMetricFamily("draftsmith_producer_stored", "Packs stored", labels=["producer"])
        for producer in snapshot["producers"]:
            seen.add_metric([producer["name"]], producer["seen"])
            stored.add_metric([producer["name"]], producer["stored"])
        yield seen
        yield stored


async def _read_json(request: Request) -> dict[str, Any]:
    received = bytearray()
    async for chunk in request.stream():
        received += chunk
        if len(received) > MAX_REQUEST_BYTES:
            raise BadRequest(413, f"the request is larger than {MAX_REQUEST_BYTES} bytes")
    try:
        body = json.loads(received)
    except ValueError as error:
        raise BadRequest(400, f"the request is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest(400, "the request is not a JSON object")
    return body


def _field(body: dict[str, Any], name: str, kind: Any, **default: Any) -> Any:
    value = body.get(name, default.get("default"))
    if not isinstance(value, kind) or isinstance(value, bool):
        raise BadRequest(400, f"{name}: got {value!r:.80}, wanted {kind}")
    return value


def _parse_want(item: Any) -> Want:
    if not isinstance(item, dict):
        raise BadRequest(400, f"a want is an object, not {item!r:.80}")
    want = Want(
        _field(item, "index", int), _field(item, "pack", str), _field(item, "features", str),
        _field(item, "input_ids", list), _field(item, "lengths", list),
    )  # fmt: skip
    if not all(type(number) is int for number in [*want.input_ids, *want.lengths]):
        raise BadRequest(400, f"want {want.id}: input_ids and lengths are lists of integers")
    if sum(want.lengths) != len(want.input_ids):
        raise BadRequest(400, f"want {want.id}: {len(want.input_ids)} token ids, lengths add up to {sum(want.lengths)}")
    return want


def _refused() -> Response:
    return PlainTextResponse("wrong or missing token", 401, headers={"WWW-Authenticate": "Bearer"})


def serve(
    host: str, port: int, token: str, config: dict[str, Any], source: SourceConfig, *, address_file: str = ""
) -> None:
    """Serve a new ledger until SIGTERM or SIGINT; then return.

    port: 0 for any free port. address_file: gets `http://host:port` when the ledger can be reached. config: see
    `messages.producer_config`. Raises UserError when the address cannot be bound.
    """
    ledger = Ledger(lease_seconds=source.lease_seconds, max_attempts=source.max_attempts, clock=time.monotonic)
    app = LedgerServer(ledger, token, config).app
    listener = _listen(host, port)
    address = f"http://{host}:{listener.getsockname()[1]}"
    log.info("ledger %s at %s (status page: %s/#token=<token>)", ledger.instance, address, address)
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=3, lifespan="off", timeout_keep_alive=60
    )  # longer than a client keeps an idle connection, so that none is closed under it
    # uvicorn ends gracefully on these signals and then raises them again for whoever handled them before: nobody.
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        if address_file:
            write_atomically(Path(address_file), address.encode())
        uvicorn.Server(settings).run(sockets=[listener])
    finally:
        listener.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    log.info("ledger %s ended", ledger.instance)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restarted ledger takes its old port
    try:
        listener.bind((host, port))
        listener.listen(512)
    except OSError as error:
        listener.close()
        raise UserError(
            f"the ledger cannot listen: {error.strerror}",
            where=f"{host}:{port}",
            fix="choose another cluster.ledger_port, or 0 for any free one",
        ) from error
    return listener


def main() -> None:
    """`python -m data_pipelines.stream.server`: one ledger process."""
    parser = argparse.ArgumentParser(prog="python -m data_pipelines.stream.server", description="Serve a ledger.")
    parser.add_argument("--config", required=True, help="JSON file: what `GET /config` answers")
    parser.add_argument("--token-file", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--address-file", default="", help="gets http://host:port when the ledger can be reached")
    parser.add_argument("--lease-seconds", type=float, default=SourceConfig.lease_seconds)
    parser.add_argument("--max-attempts", type=int, default=SourceConfig.max_attempts)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    source = SourceConfig(name="stream", lease_seconds=options.lease_seconds, max_attempts=options.max_attempts)
    config = json.loads(Path(options.config).read_text())
    token = read_token(options.token_file)
    serve(options.host, options.port, token, config, source, address_file=options.address_file)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"{os.path.basename(__file__)}: {error}") from error
