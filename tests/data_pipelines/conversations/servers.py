"""Servers to regenerate through: transformers' own, what stands between it and the caller, and a scripted one."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from data_pipelines.conversations import chat_server
from data_pipelines.conversations.config import RegenerateConfig
from data_pipelines.conversations.regenerate import regenerate
from data_pipelines.conversations.rows import read_rows
from data_pipelines.engines.targets import Target
from tests.data_pipelines import serving


def regenerate_in_process(target: str, source: str, out: str, options: dict) -> None:
    """What a process that is to be killed runs."""
    chat_server._FIRST_PAUSE = 0.01
    answerer = chat_server.ChatServer(RegenerateConfig(**options), Target(target, "tiny"))
    regenerate(lambda: read_rows(source), answerer, Path(out))


class TransformersServe:
    """`transformers serve`, a process of its own."""

    def __init__(self, model: str, log: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        program = "from transformers.cli.transformers import main; main()"
        command = [sys.executable, "-c", program, "serve", model, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--device", "cpu", "--dtype", "float32"]
        with log.open("w") as file:
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        deadline = time.monotonic() + 120
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).raise_for_status()
                return
            except httpx.HTTPError:
                assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class Served(serving.Served):
    """Such a server: `url` is what a client is given."""

    @property
    def url(self) -> str:
        return f"{self.address}/v1"


class _Cut(Response):
    """The beginning of an answer; then the connection is gone."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000")]})
        await send({"type": "http.response.body", "body": b'{"choices": [{"mess', "more_body": True})
        raise ConnectionError("cut")


class FlakyProxy:
    """Stands before a server; every third request or so it does what servers and networks do. faults: how often what."""

    KINDS = ("too many", "error", "cut", "slow", "garbled")

    def __init__(self, upstream: str, slow_seconds: float, seed: int = 0):
        self.faults: Counter[str] = Counter()
        self._random, self._slow_seconds = random.Random(seed), slow_seconds
        self._http = httpx.AsyncClient(base_url=upstream, trust_env=False, timeout=120)
        self.app = Starlette(routes=[Route("/v1/{path:path}", self._pass_on, methods=["GET", "POST"])])

    async def _pass_on(self, request: Request) -> Response:
        body = await request.body()
        if self._random.random() < 0.35:
            kind = self.KINDS[self._random.randrange(len(self.KINDS))]
            self.faults[kind] += 1
            if kind == "too many":
                return PlainTextResponse("slow down", 429, headers={"Retry-After": "0.05"})
            if kind == "error":
                return PlainTextResponse("oh", self._random.choice([500, 502, 503]))
            if kind == "cut":
                return _Cut()
            if kind == "garbled":
                return PlainTextResponse('{"choices": []}')
            await asyncio.sleep(self._slow_seconds)
        answer = await self._http.request(
            request.method, request.path_params["path"], content=body, headers={"Content-Type": "application/json"}
        )
        return Response(answer.content, answer.status_code, media_type="application/json")


class Scripted:
    """Answers as its `script` says: script(body) → a Response, or the text of an answer. bodies: what it was asked."""

    def __init__(self, script: Callable[[dict], Response | str], count: Callable[[list[dict]], int]):
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self._script, self._count = script, count
        chat = Route("/v1/chat/completions", self._chat, methods=["POST"])
        models = Route("/v1/models", lambda request: JSONResponse({"data": [{"id": "the-target"}]}))
        self.app = Starlette(routes=[chat, models])

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        said = "Hello" if body["messages"][-1]["content"] == "Hello" else self._script(body)
        if isinstance(said, Response):
            return said
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        return JSONResponse({"choices": [choice], "usage": {"prompt_tokens": self._count(body["messages"])}})
