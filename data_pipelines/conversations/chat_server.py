"""Any OpenAI-compatible server answers: many conversations at once, one after another in each of as many workers.

What a server does to a request decides what happens next:

* 429, 5xx, a timeout, a cut connection, an answer that is no JSON: asked again, after twice as long each time, with
  jitter, or when `Retry-After` says so.
* No answer to anything for `patience_seconds`: the run stops and says so; the same command goes on.
* `max_attempts` failures of one request while the server answers others, or another 4xx: the row is refused, with the
  reason.
* A prompt that has another number of tokens, or other tokens, than the target's own template gives: another model or
  template answers there. The run stops if it is so from the start; else the row is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import hashlib
import json
import os
import random
import re
import ssl
import time
from asyncio import sleep
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
from transformers import GenerationConfig

from ..engines.targets import Target
from ..errors import UserError
from .config import RegenerateConfig
from .messages import Message, read_conversation
from .quarantine import Unrenderable
from .regenerate import Done, Prompt, turns_before_answer
from .rendering import prompt_ids
from .templates import check_template

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0  # seconds between attempts
_REJECTED_BEFORE_ANY_ANSWER = 20  # rows, before the run stops: the fault is not in the rows
_GREETING: list[Message] = [{"role": "user", "content": "Hello"}]


class _Again(Exception):
    """The request may be repeated. seconds: what the server asks to wait. counts: it may be this request's fault."""

    def __init__(self, problem: str, *, seconds: float = 0.0, counts: bool = True):
        super().__init__(problem)
        self.seconds, self.counts = seconds, counts


class _Rejected(Exception):
    """The request will never be answered; the text is the same for all requests of its kind."""

    def __init__(self, reason: str, detail: str = "", status: int = 0):
        super().__init__(reason)
        self.detail, self.status = detail, status


class ChatServer:
    """An `Answerer`. seed: of the answers, where the server samples them and takes seeds."""

    def __init__(self, config: RegenerateConfig, target: Target, seed: int = 0):
        self._config, self._tokenizer, self._seed = config, target.load_tokenizer(), seed
        check_template(self._tokenizer)
        self._sampling, self._key = sampling(config, _generation_config(target)), _api_key(config)
        self._model, self._wants_ids = config.model, True
        self._answered_at = 0.0  # when the server answered anything last
        self._answered = self._rejected = 0
        # Not the address: a run may go on with another server of the same model.
        self.identity = json.dumps(
            [target.fingerprint, self._tokenizer.chat_template, config.max_new_tokens, self._sampling, seed]
        )

    def answer(self, prompts: Iterator[Prompt], done: Done) -> None:
        asyncio.run(self._answer_all(prompts, done))

    async def _answer_all(self, prompts: Iterator[Prompt], done: Done) -> None:
        verify = ssl.create_default_context()
        async with self._connect(verify) as http:
            await self._get_to_know(http)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._config.concurrency):
                    group.create_task(self._work(verify, prompts, done))
        except* UserError as errors:  # all that there are say the same
            raise errors.exceptions[0] from None

    def _connect(self, verify: ssl.SSLContext) -> httpx.AsyncClient:
        """One connection. Every worker has its own, because httpx looks through all that a client has each time."""
        return httpx.AsyncClient(
            base_url=self._config.server.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(self._config.timeout_seconds, connect=10.0),
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=1),
            verify=verify,
            trust_env=False,  # the configuration alone decides where requests go
        )

    async def _work(self, verify: ssl.SSLContext, prompts: Iterator[Prompt], done: Done) -> None:
        async with self._connect(verify) as http:
            for prompt in prompts:
                try:
                    messages, finish = await self._converse(http, prompt)
                except Unrenderable as error:
                    done(prompt.index, prompt.refused(str(error)))
                except _Rejected as error:
                    done(prompt.index, prompt.refused(str(error), error.detail))
                    self._rejected += 1
                    if not self._answered and self._rejected >= _REJECTED_BEFORE_ANY_ANSWER:
                        raise UserError(
                            f"the server has answered none of {self._rejected} rows: {error}: {error.detail}",
                            where=self._config.server,
                        ) from None
                else:
                    done(prompt.index, prompt.answered(messages, finish))
                    self._answered += 1

    async def _converse(self, http: httpx.AsyncClient, prompt: Prompt) -> tuple[list[Message], str]:
        """(the conversation with its answers, how the last one ended)."""
        waiting, history, finish = list(prompt.messages), [], "stop"
        while finish == "stop" and turns_before_answer(waiting, history):
            today = datetime.now()  # a template that writes the day writes the server's there
            expected = prompt_ids(self._tokenizer, history, prompt.tools, day=today)
            body = self._body(history, self._config.max_new_tokens)
            if prompt.tools:
                body["tools"] = prompt.tools
            if self._sampling["temperature"] > 0:
                body["seed"] = _seed(self._seed, prompt.index, len(history))
            answer = await self._ask(http, body)
            self._check_prompt(answer, expected)
            message, finish = _read_answer(answer)
            history.append(message)
        return history, finish

    def _body(self, messages: list[Message], max_tokens: int) -> dict[str, Any]:
        body = {"model": self._model, "messages": [_to_send(m) for m in messages], "max_tokens": max_tokens}
        return body | self._sampling | ({"return_token_ids": True} if self._wants_ids else {})

    async def _get_to_know(self, http: httpx.AsyncClient) -> None:
        """Learn the model's name and whether token ids can be had; see that the server renders as the target does.

        Raises UserError for what would go wrong with every row.
        """
        self._answered_at = time.monotonic()
        try:
            if not self._model:
                self._model = await self._only_model(http)
            try:
                answer = await self._ask(http, self._body(_GREETING, 1))
            except _Rejected as error:
                if error.status not in (400, 422):
                    raise
                self._wants_ids = False  # an extension of vLLM's, which others may refuse
                answer = await self._ask(http, self._body(_GREETING, 1))
            self._check_prompt(answer, prompt_ids(self._tokenizer, _GREETING, day=datetime.now()))
        except _Rejected as error:
            raise UserError(
                f"{error}: {error.detail}",
                where=self._config.server,
                fix="serve the target itself with its own chat template, and name it as the server does:"
                " data.regenerate.model=<name>",
            ) from None

    async def _only_model(self, http: httpx.AsyncClient) -> str:
        fix = "name the one that is the target: data.regenerate.model=<name>"
        try:
            names = [model["id"] for model in (await self._insist(http, "GET", "models"))["data"]]
        except (_Rejected, KeyError, TypeError):
            raise UserError("the server does not list its models", where=self._config.server, fix=fix) from None
        if len(names) != 1:
            what = f"the server has {len(names)} models: {', '.join(map(str, names[:10]))}"
            raise UserError(what, where=self._config.server, fix=fix)
        return names[0]

    def _check_prompt(self, answer: dict[str, Any], expected: list[int]) -> None:
        """That the server was asked what the target's own template asks, as far as it tells: by token ids, or by number."""
        ids, usage = answer.get("prompt_token_ids"), answer.get("usage")
        number = len(ids) if ids else usage.get("prompt_tokens") if isinstance(usage, dict) else None
        same = ids == expected if ids else number in (None, len(expected))
        if self._config.check_prompts and not same:
            raise _Rejected(
                "the server's prompt is not what the target's chat template gives",
                f"{number} tokens there, {len(expected)} here (data.regenerate.check_prompts=false lets that pass)",
            )

    async def _ask(self, http: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
        return await self._insist(http, "POST", "chat/completions", body)

    async def _insist(self, http: httpx.AsyncClient, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """The server's answer, however often it has to be asked.

        Raises _Rejected when this request is not answered, and UserError when the server has stopped answering.
        """
        failures, pause, first = 0, _FIRST_PAUSE, 0.0
        while True:
            try:
                return await self._call(http, method, path, body)
            except _Again as again:
                problem, seconds = str(again), again.seconds
                failures += again.counts
            first = first or time.monotonic()
            if failures >= self._config.max_attempts and (method == "GET" or await self._answers_others(http, first)):
                raise _Rejected(f"no answer after {self._config.max_attempts} attempts: {problem}")
            if time.monotonic() - max(first, self._answered_at) > self._config.patience_seconds:
                raise UserError(
                    f"the server has answered nothing for {self._config.patience_seconds:.0f} s: {problem}",
                    where=self._config.server,
                    fix="start it again, then this command: what is answered already is kept",
                )
            await sleep(max(seconds, pause * random.uniform(0.5, 1.5)))  # so that not all come at once
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _answers_others(self, http: httpx.AsyncClient, since: float) -> bool:
        if self._answered_at <= since:
            with contextlib.suppress(_Again, _Rejected):
                await self._call(http, "POST", "chat/completions", self._body(_GREETING, 1))
        return self._answered_at > since

    async def _call(self, http: httpx.AsyncClient, method: str, path: str, body: Any) -> dict[str, Any]:
        content = None if body is None else json.dumps(body).encode()
        try:
            response = await http.request(method, path, content=content, headers={"Content-Type": "application/json"})
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _Again(f"it cannot be reached ({error})", counts=False) from None
        except httpx.RequestError as error:
            raise _Again(f"the connection failed ({type(error).__name__})") from None
        status, detail = response.status_code, response.text[:500]
        if status == 200:
            return self._read(response)
        if status in (401, 403, 404):
            fix = {404: "check data.regenerate.server and data.regenerate.model"}
            raise UserError(
                f"the server answers {status}: {detail}",
                where=str(response.url),
                fix=fix.get(status, "check data.regenerate.api_key_file or api_key_variable"),
            )
        if status in (408, 425, 429) or status >= 500:
            raise _Again(f"it answers {status}", seconds=_retry_after(response), counts=status not in (429, 503))
        # Numbers differ from row to row, and the reason is the same for all rows of its kind.
        raise _Rejected(f"the server answers {status}: {re.sub('[0-9]+', 'N', detail)[:200]}", detail, status)

    def _read(self, response: httpx.Response) -> dict[str, Any]:
        try:
            answer = response.json()
            if "data" not in answer:
                answer["choices"][0]["message"]["role"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise _Again("what it answers is not understood") from None
        self._answered_at = time.monotonic()
        return answer


def sampling(config: RegenerateConfig, generation: GenerationConfig) -> dict[str, float]:
    """The sampling parameters to send: those of the config, then those that the target's generation config names."""
    own = generation.to_diff_dict()
    if not own.get("do_sample"):
        own = {"temperature": 0.0, "repetition_penalty": own.get("repetition_penalty")}
    chosen = {name: own.get(name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    chosen |= {name: getattr(config, name) for name in chosen if getattr(config, name) is not None}
    if chosen["temperature"] is None:
        chosen["temperature"] = 1.0
    return {name: value for name, value in chosen.items() if value is not None}


def _generation_config(target: Target) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(target.path)
    except OSError:  # it has none
        return GenerationConfig()


def _read_answer(answer: dict[str, Any]) -> tuple[Message, str]:
    """(the turn, how it ended: stop, length or tool_calls). Raises Unrenderable for one that cannot be trained on."""
    choice = answer["choices"][0]
    finish = "tool_calls" if choice.get("finish_reason") == "function_call" else choice.get("finish_reason")
    if finish not in ("stop", "length", "tool_calls"):
        raise _Rejected(f"the server ended an answer for another reason: {finish}")
    turn = {**choice["message"], "role": "assistant", "token_ids": choice.get("token_ids")}
    return read_conversation([{"role": "user", "content": ""}, turn]).messages[-1], finish


def _to_send(message: Message) -> Message:
    """A turn as OpenAI's interface has it: what tools are called with is JSON text there."""
    sent = {key: message[key] for key in ("role", "content", "name", "tool_call_id") if key in message}
    if "reasoning" in message:
        sent["reasoning_content"] = message["reasoning"]
    if "tool_calls" in message:
        calls = [(call, call["function"]) for call in message["tool_calls"]]
        sent["tool_calls"] = [
            {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}
            for call, function in calls
        ]
    return sent


def _seed(seed: int, index: int, turn: int) -> int:
    """Of one answer, so that it does not depend on which rows were asked before it."""
    return int.from_bytes(hashlib.sha256(f"{seed} {index} {turn}".encode()).digest()[:4], "big") >> 1


def _retry_after(response: httpx.Response) -> float:
    """Seconds; the header has them as a number or as a date."""
    value = response.headers.get("retry-after", "")
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0


def _api_key(config: RegenerateConfig) -> str:
    """From the file or the environment variable that the config names."""
    if config.api_key_variable:
        key = os.environ.get(config.api_key_variable, "").strip()
        if not key:
            raise UserError(f"the environment variable {config.api_key_variable} holds no API key")
        return key
    if not config.api_key_file:
        return ""
    try:
        key = Path(config.api_key_file).expanduser().read_text().strip()
    except OSError as error:
        raise UserError(f"the API key cannot be read: {error.strerror}", where=config.api_key_file) from error
    if not key:
        raise UserError("the file with the API key is empty", where=config.api_key_file)
    return key
