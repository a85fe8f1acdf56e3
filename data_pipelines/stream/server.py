"""The ledger over HTTP: JSON, a bearer token, long polling, metrics, a status page.

    POST /want /locate /lost /consumed /report   trainer ranks        GET /status /metrics   numbers (token)
    POST /lease /stored /failed /reconcile       producers            GET /health /          no token, no data
    POST /finish                                 rank 0, at the end   GET /config            what a producer needs

Requests are the models of `messages`. 400: not understood, 401: wrong token, 409: a newer trainer has taken over,
413: too large.

One event loop owns the ledger, so nothing is locked. By hand: `python -m data_pipelines.stream.server --help`.
"""

from __future__ import annotations

import argparse
import hmac
import json
import logging
import os
import signal
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ..errors import UserError
from ..logs import configure_logging, fields
from ..stores.filesystem import write_atomically
from . import messages
from .config import SourceConfig
from .ledger import Ledger, Retired
from .messages import MAX_WAIT_SECONDS, Message, read_token
from .metrics import LedgerCollector
from .polls import Polls
from .status_page import STATUS_HEADERS, STATUS_PAGE
from .wants import FAILED, STORED, UNKNOWN, Lease, Location, Want

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 32 * 1024**2

Answer = dict[str, Any]


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
        self._polls = Polls()
        self._metrics = CollectorRegistry()
        self._metrics.register(LedgerCollector(ledger.snapshot))
        routes = [
            self._post("/want", messages.WantRequest, self._want),
            self._post("/locate", messages.LocateRequest, self._locate),
            self._post("/lost", messages.LostRequest, self._lost),
            self._post("/consumed", messages.ConsumedRequest, self._consumed),
            self._post("/report", messages.Report, self._report),
            self._post("/lease", messages.LeaseRequest, self._lease),
            self._post("/stored", messages.StoredRequest, self._stored),
            self._post("/failed", messages.FailedRequest, self._failed),
            self._post("/reconcile", messages.ReconcileRequest, self._reconcile),
            self._post("/finish", messages.FinishRequest, self._finish),
            self._get("/config", lambda: JSONResponse({**self._config, "instance": ledger.instance})),
            self._get("/status", lambda: JSONResponse(ledger.snapshot())),
            self._get("/metrics", lambda: Response(generate_latest(self._metrics), media_type=CONTENT_TYPE_LATEST)),
            Route("/health", lambda request: JSONResponse({"status": "ok"})),
            Route("/", lambda request: HTMLResponse(STATUS_PAGE, headers=STATUS_HEADERS)),
        ]
        self.app = Starlette(routes=routes)

    # Trainer ranks

    async def _want(self, asked: messages.WantRequest, request: Request) -> Answer:
        before = self.ledger.session
        self.ledger.want([Want(**dict(want)) for want in asked.wants])
        if before != self.ledger.session:
            log.info("a trainer begins", extra=fields(session=self.ledger.session, after=before or "none"))
        return {}

    async def _locate(self, asked: messages.LocateRequest, request: Request) -> Answer:
        def poll() -> Location | None:
            location = self.ledger.locate(asked.want)
            return location if location.state in (STORED, FAILED, UNKNOWN) else None

        location = await self._until(poll, asked.wait, request, (asked.want,))
        return vars(location or self.ledger.locate(asked.want))

    async def _lost(self, asked: messages.LostRequest, request: Request) -> Answer:
        log.warning("lost", extra=fields(want=asked.want, reason=asked.reason))
        accepted = self.ledger.lost(asked.want, asked.lease, asked.reason, removed=asked.removed)
        return {"accepted": accepted}

    async def _consumed(self, asked: messages.ConsumedRequest, request: Request) -> Answer:
        superfluous = self.ledger.consumed(asked.want, asked.lease, removed=asked.removed)
        return {"remove": superfluous}

    async def _report(self, asked: messages.Report, request: Request) -> Answer:
        self.ledger.report(asked)
        return {}

    # Producers

    async def _lease(self, asked: messages.LeaseRequest, request: Request) -> Answer:
        def poll() -> Lease | bool | None:
            if self.ledger.dismissed(asked.producer):
                return True
            lease = self.ledger.lease(asked.producer, asked.features, asked.about)
            return lease or self.ledger.untidy(asked.producer)

        room = _for_lease(asked.features)
        answer = await self._until(poll, asked.wait, request, (room, asked.producer))
        if isinstance(answer, Lease):
            self._polls.wake_one(room)  # there may be more
        return {
            "lease": _written(answer) if isinstance(answer, Lease) else None,
            "finished": self.ledger.dismissed(asked.producer),
            "reconcile": self.ledger.untidy(asked.producer),
        }

    async def _stored(self, asked: messages.StoredRequest, request: Request) -> Answer:
        accepted = self.ledger.stored(asked.producer, asked.want, asked.lease, asked.size, asked.checksum)
        return {"accepted": accepted}

    async def _failed(self, asked: messages.FailedRequest, request: Request) -> Answer:
        log.warning("failed", extra=fields(producer=asked.producer, want=asked.want, reason=asked.reason))
        accepted = self.ledger.failed(asked.producer, asked.want, asked.lease, asked.reason)
        return {"accepted": accepted}

    async def _reconcile(self, asked: messages.ReconcileRequest, request: Request) -> Answer:
        keep = self.ledger.reconcile(asked.producer, asked.keys)
        return {"keep": keep}

    async def _finish(self, asked: messages.FinishRequest, request: Request) -> Answer:
        self.ledger.finish()
        self._polls.wake_all()
        return {}

    # Their common part

    def _get(self, path: str, render: Callable[[], Response]) -> Route:
        async def endpoint(request: Request) -> Response:
            return render() if self._authorized(request) else _refused()

        return Route(path, endpoint)

    def _post(self, path: str, model: type[Message], handler: Callable[[Any, Request], Awaitable[Answer]]) -> Route:
        async def endpoint(request: Request) -> Response:
            if not self._authorized(request):
                return _refused()
            try:
                answer = await handler(await _read(request, model), request)
                self._spread_news()
            except BadRequest as error:
                return PlainTextResponse(str(error), error.status)
            except Retired as error:
                return PlainTextResponse(str(error), 409)
            except ClientDisconnect:
                return Response(status_code=400)  # nobody reads it
            return JSONResponse({**answer, "instance": self.ledger.instance})

        return Route(path, endpoint, methods=["POST"])

    def _authorized(self, request: Request) -> bool:
        given = request.headers.get("authorization", "").encode("utf-8", "replace")
        return hmac.compare_digest(given, b"Bearer " + self._token)

    def _spread_news(self) -> None:
        """Wake those whom it concerns: of the producers, one, who wakes the next if it gets something."""
        news, offers = self.ledger.take_news()
        for name in news:
            self._polls.wake(name)
        for features in offers:
            self._polls.wake_one(_for_lease(features))

    async def _until(self, poll: Callable[[], Any], wait: float, request: Request, names: tuple[str, ...]) -> Any:
        """The first answer of `poll` that is not None (or False), or None after `wait` (bounded) seconds.

        names: what its answer depends on; the first is passed on by a caller that has gone away and gets nothing: a lease
        handed to it would be an attempt wasted.
        """
        deadline = time.monotonic() + min(wait, MAX_WAIT_SECONDS)
        while True:
            if answer := poll():
                return answer
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            if await self._polls.sleep(names, left) and await request.is_disconnected():
                self._polls.wake_one(names[0])
                return None


def _written(lease: Lease) -> Answer:
    return {**vars(lease), "input_ids": b64encode(lease.input_ids).decode()}


def _for_lease(features: str) -> str:
    """What producers without work wait for."""
    return f"lease of {features}"


async def _read(request: Request, model: type[Message]) -> Any:
    """The request, as it should be. Raises BadRequest."""
    received = bytearray()
    async for chunk in request.stream():
        received += chunk
        if len(received) > MAX_REQUEST_BYTES:
            raise BadRequest(413, f"the request is larger than {MAX_REQUEST_BYTES} bytes")
    try:
        return model.model_validate_json(received)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        text = "; ".join(f"{'.'.join(map(str, p['loc'])) or 'request'}: {p['msg']}" for p in problems[:3])
        raise BadRequest(400, text) from error


def _refused() -> Response:
    return PlainTextResponse("wrong or missing token", 401, headers={"WWW-Authenticate": "Bearer"})


def serve(
    host: str,
    port: int,
    token: str,
    config: dict[str, Any],
    source: SourceConfig,
    *,
    address_file: str = "",
    tls_cert: str = "",
    tls_key: str = "",
) -> None:
    """Serve a new ledger until SIGTERM or SIGINT; then return.

    port: 0 for any free port. address_file: gets `http://host:port` when the ledger can be reached. config: see
    `messages.producer_config`. source: lease_seconds, max_attempts and window_bytes are used. tls_cert, tls_key: PEM
    files; with them the address is https. Raises UserError when the address cannot be bound or the files are no good.
    """
    ledger = Ledger(
        lease_seconds=source.lease_seconds,
        max_attempts=source.max_attempts,
        clock=time.monotonic,
        window_bytes=source.window_bytes,
    )
    app = LedgerServer(ledger, token, config).app
    _check_tls(tls_cert, tls_key)
    settings = uvicorn.Config(
        app,
        log_level="warning",
        log_config=None,  # ours
        access_log=False,
        timeout_graceful_shutdown=3,
        lifespan="off",
        timeout_keep_alive=60,  # longer than a client keeps an idle connection, so that none is closed under it
        ssl_certfile=tls_cert or None,
        ssl_keyfile=tls_key or None,
    )
    listener = _listen(host, port)
    name = f"[{host}]" if ":" in host else host
    address = f"{'https' if tls_cert else 'http'}://{name}:{listener.getsockname()[1]}"
    log.info("ledger %s at %s (status page: %s/#token=<token>)", ledger.instance, address, address)
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


def _check_tls(cert: str, key: str) -> None:
    if bool(cert) != bool(key):
        raise UserError("TLS needs a certificate and its key", fix="set both cluster.tls_cert and cluster.tls_key")
    if not cert:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:  # an encrypted key; ssl.SSLError is an OSError
        raise UserError(
            f"certificate and key cannot be used: {error}",
            where=f"{cert}, {key}",
            fix="give PEM files that belong together; the key without a password",
        ) from error


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restarted ledger takes its old port
    # Inherited by every connection. Else an answer's body waits some 40 ms for the acknowledgement of its header.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
    parser.add_argument("--address-file", default="", help="gets http(s)://host:port when the ledger can be reached")
    parser.add_argument("--lease-seconds", type=float, default=SourceConfig.lease_seconds)
    parser.add_argument("--max-attempts", type=int, default=SourceConfig.max_attempts)
    parser.add_argument("--window-bytes", type=int, default=SourceConfig.window_bytes)
    parser.add_argument("--tls-cert", default="", help="PEM file; with it and its key the ledger speaks https")
    parser.add_argument("--tls-key", default="")
    options = parser.parse_args()
    configure_logging("ledger")
    source = SourceConfig(
        name="stream",
        lease_seconds=options.lease_seconds,
        max_attempts=options.max_attempts,
        window_bytes=options.window_bytes,
    )
    config = json.loads(Path(options.config).read_text())
    token = read_token(options.token_file)
    serve(
        options.host, options.port, token, config, source,
        address_file=options.address_file, tls_cert=options.tls_cert, tls_key=options.tls_key,
    )  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"{os.path.basename(__file__)}: {error}") from error
