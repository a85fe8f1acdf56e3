"""The target answers in this process: greedily, in batches of prompts of one domain and like length, padded on the left.

Padding changes the order of floating-point sums, so that a near tie may fall otherwise in another batch: `agreement`
counts how often.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..engines.targets import Target
from .messages import Conversation, Message
from .quarantine import Unrenderable
from .regenerate import Done, Prompt, row_id, turns_before_answer
from .rendering import prompt_ids, render_documents, stop_ids
from .rows import Row, conversation
from .templates import check_template


@dataclass(frozen=True)
class Generated:
    ids: list[int]  # with the token that ended it
    text: str
    finish_reason: str


class Greedy:
    """An `Answerer`. Plain argmax in float32 (near ties fall the same way more often than in bfloat16), whatever the
    target's own generation config says of sampling and penalties."""

    def __init__(self, target: Target, *, max_new_tokens: int, batch_size: int = 32):
        self._target, self._tokenizer = target, target.load_tokenizer()
        check_template(self._tokenizer)
        self._max_new_tokens, self._batch_size = max_new_tokens, batch_size
        self.identity = json.dumps([target.fingerprint, self._tokenizer.chat_template, max_new_tokens, "token_ids"])

    def answer(self, prompts: Iterator[Prompt], done: Done) -> None:
        model, measured = self._target.load_model(torch.float32), []
        for prompt in prompts:
            try:
                measured.append((self._length(prompt), prompt))
            except Unrenderable as error:
                done(prompt.index, prompt.refused(str(error)))
        # Prompts of one domain get answers of like length, and a batch takes as long as its longest answer.
        measured.sort(key=lambda pair: (str(pair[1].row.data.get("domain", "")), pair[0], pair[1].index))
        for first in range(0, len(measured), self._batch_size):
            batch = [prompt for _, prompt in measured[first : first + self._batch_size]]
            for prompt, line in zip(batch, self._answer(model, batch)):
                done(prompt.index, line)

    def _length(self, prompt: Prompt) -> int:
        """Tokens before the first answer."""
        first = [m["role"] for m in prompt.messages].index("assistant")
        return len(prompt_ids(self._tokenizer, prompt.messages[:first], prompt.tools))

    def _answer(self, model: PreTrainedModel, batch: list[Prompt]) -> list[dict[str, Any]]:
        """Answer the turns of a batch of conversations: all first turns together, then all second ones, and so on."""
        histories: list[list[Message]] = [[] for _ in batch]
        finish = ["stop"] * len(batch)
        waiting = [list(prompt.messages) for prompt in batch]
        refused: dict[int, str] = {}
        while active := [i for i in range(len(batch)) if turns_before_answer(waiting[i], histories[i])]:
            ids = {}
            for i in active:
                try:
                    ids[i] = prompt_ids(self._tokenizer, histories[i], batch[i].tools)
                except Unrenderable as error:
                    refused[i], waiting[i] = str(error), []
            answers = generate(list(ids.values()), model, self._tokenizer, self._max_new_tokens) if ids else []
            for i, answer in zip(ids, answers):
                # The ids are trained on as they are: text may cut in another way, or write out a special token.
                histories[i].append({"role": "assistant", "content": answer.text, "token_ids": answer.ids})
                finish[i] = answer.finish_reason
                if answer.finish_reason == "length":
                    waiting[i] = []
        return [
            prompt.refused(refused[i]) if i in refused else prompt.answered(histories[i], finish[i])
            for i, prompt in enumerate(batch)
        ]


def generate(
    prompts: Sequence[list[int]], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int
) -> list[Generated]:
    """Greedy answers of one batch."""
    stops = stop_ids(tokenizer, model.generation_config)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stops[0]
    width = max(map(len, prompts))
    input_ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
    attention_mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    neutral = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=stops, pad_token_id=pad)
    with torch.inference_mode(), _generation_config(model, neutral):
        output = model.generate(input_ids=input_ids, attention_mask=attention_mask)
    answers = []
    for ids in output[:, width:].tolist():
        end = next((i for i, token in enumerate(ids) if token in stops), None)
        text = tokenizer.decode(ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        answers.append(Generated(ids if end is None else ids[: end + 1], text, "length" if end is None else "stop"))
    return answers


@dataclass
class Agreement:
    """How many of `total` answers the target gave again; for each other one (row id, index of the first token that
    differs)."""

    same: int
    total: int
    mismatches: list[tuple[str, int]]


def agreement(
    rows: Sequence[Row],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    n: int,
    *,
    max_new_tokens: int = 128,
    batch_size: int = 32,
) -> Agreement:
    """Have the target answer n of the rows again (spread evenly over them) and compare with their last answers.

    An answer that one of the two limits cut is compared as far as both go.
    """
    chosen = []
    for row in rows:
        try:
            chosen.append((row, conversation(row)))
        except Unrenderable:
            continue
    chosen = [chosen[i * len(chosen) // n] for i in range(min(n, len(chosen)))] if len(chosen) > n else chosen
    result = Agreement(0, len(chosen), [])
    for first in range(0, len(chosen), batch_size):
        batch = chosen[first : first + batch_size]
        prompts = [prompt_ids(tokenizer, talk.messages[:-1], talk.tools) for _, talk in batch]
        for (row, talk), answer in zip(batch, generate(prompts, model, tokenizer, max_new_tokens)):
            index = _first_difference(talk, answer, tokenizer)
            if index is None:
                result.same += 1
            else:
                result.mismatches.append((row_id(row), index))
    return result


def _first_difference(row: Conversation, answer: Generated, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Index of the first token at which the answer differs from the row's last one; None where they agree.

    The row's text is tokenised anew, which may cut it in another way than the target wrote it: equal text agrees.
    """
    if answer.text == row.messages[-1]["content"] and row.truncated == (answer.finish_reason == "length"):
        return None
    ids, _ = render_documents(tokenizer, row)[-1]
    expected = ids[len(prompt_ids(tokenizer, row.messages[:-1], row.tools)) :]
    return next((i for i, (a, b) in enumerate(zip(expected, answer.ids)) if a != b), None)


@contextmanager
def _generation_config(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """`generate` fills what a given config leaves open from the model's own: for its time the model has no other."""
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own
