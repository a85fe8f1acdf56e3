"""The target answers prompts itself: answers that are the target's own are what a drafter has to predict.

Greedy, in batches of prompts of one domain and like length, padded on the left. Every answered row goes to a partial
file at once; the whole file appears by a rename. A killed run goes on where it stopped. Padding changes the order of
floating-point sums, so that a near tie may fall otherwise in another batch: `agreement` counts how often.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import UserError
from .quarantine import describe
from .rendering import Message, Unrenderable, check_template, prompt_ids, render, stop_ids
from .rows import Conversation, Row, conversation, read_rows


@dataclass
class Regenerated:
    """What was written: rows in all, how many were answered in this call and how many lay in the partial file already,
    how many answers the limit cut, and how many rows were refused, by reason. answered + resumed + refused = rows."""

    rows: int = 0
    answered: int = 0
    resumed: int = 0
    cut: int = 0
    refused: dict[str, int] = field(default_factory=dict)


@dataclass
class Agreement:
    """How many of `total` answers the target gave again; for each other one (row id, index of the first token that
    differs)."""

    same: int
    total: int
    mismatches: list[tuple[str, int]]


@dataclass(frozen=True)
class _Answer:
    ids: list[int]  # with the token that ended it
    text: str
    finish_reason: str


def regenerate_file(
    path: str,
    out: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_rows: int = 0,
    seed: int = 0,
    max_new_tokens: int = 128,
    batch_size: int = 32,
) -> Regenerated:
    """Read the rows that `path` names (see `read_rows`), have them answered, write them to the JSONL file `out`."""
    rows = read_rows(path, max_rows, seed)
    return regenerate(rows, model, tokenizer, out, max_new_tokens=max_new_tokens, batch_size=batch_size)


def regenerate(
    rows: Iterable[Row],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    *,
    max_new_tokens: int = 128,
    batch_size: int = 32,
) -> Regenerated:
    """Have the target answer the rows; write `out`, one JSON line per row, in the rows' order.

    Every assistant turn of a row is generated, in order, each after the target's own earlier answers; a row that ends
    with a user turn gets its answer. An answer that the limit cuts ends its row, because what follows in the row
    replied to another one. A written row is {"id", "domain", "messages", "finish_reason": "stop" | "length"} and
    whatever else the row had. A row that cannot be prompted becomes {"id", "refused": reason, "origin", "row"}, and is
    quarantined for that reason when the file is trained on.

    Resumable: the same call after a kill skips the rows that the partial file beside `out` holds. The partial file's
    name depends on the target, the rows and the limit, so that answers of another call are never mixed in.
    Raises UserError when no row at all can be prompted.
    """
    check_template(tokenizer)
    rows = list(rows)
    prompts, refused = _read_prompts(rows, tokenizer)
    result = Regenerated(rows=len(rows), refused=dict(Counter(line["refused"] for line in refused.values())))
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{_fingerprint(rows, model, tokenizer, max_new_tokens)}.partial")
    done = _read_partial(partial)
    lines = {**refused, **done}
    # Prompts of one domain get answers of like length, and a batch takes as long as its longest answer.
    order = {i: (str(rows[i].data.get("domain", "")), length, i) for i, (_, length) in prompts.items()}
    todo = sorted((i for i in prompts if i not in done), key=order.__getitem__)
    with (
        partial.open("a", encoding="utf-8") as file,
        tqdm(total=len(prompts), initial=len(done), desc="answers", unit="row", leave=False, disable=None) as bar,
    ):
        for first in range(0, len(todo), batch_size):
            batch = todo[first : first + batch_size]
            answered = _answer([(rows[i], prompts[i][0]) for i in batch], model, tokenizer, max_new_tokens)
            for index, line in zip(batch, answered):
                lines[index] = line
                file.write(json.dumps({"index": index, "line": line}, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
            bar.update(len(batch))
    result.resumed = len(done)
    result.answered = len(todo)
    result.cut = sum(line.get("finish_reason") == "length" for line in lines.values())
    _write_atomically(out, [lines[i] for i in range(len(rows))])
    partial.unlink()
    return result


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
        answers = generate([prompt_ids(tokenizer, c.messages[:-1]) for _, c in batch], model, tokenizer, max_new_tokens)
        for (row, c), answer in zip(batch, answers):
            index = _first_difference(c, answer, tokenizer)
            if index is None:
                result.same += 1
            else:
                result.mismatches.append((_row_id(row), index))
    return result


def generate(
    prompts: Sequence[list[int]], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int
) -> list[_Answer]:
    """Greedy answers of one batch: plain argmax, whatever the model's own generation config says of penalties."""
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
        content = ids[:end]
        text = tokenizer.decode(content, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        answers.append(_Answer(ids if end is None else ids[: end + 1], text, "length" if end is None else "stop"))
    return answers


def _answer(
    batch: list[tuple[Row, list[Message]]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
) -> list[dict]:
    """Answer the turns of a batch of conversations: all first turns together, then all second ones, and so on."""
    histories: list[list[Message]] = [[] for _ in batch]
    finish = ["stop"] * len(batch)
    waiting = [list(messages) for _, messages in batch]
    while active := [i for i in range(len(batch)) if waiting[i]]:
        for i in active:
            while waiting[i] and waiting[i][0]["role"] != "assistant":
                histories[i].append(waiting[i].pop(0))
            waiting[i] = waiting[i][1:]
        answers = generate([prompt_ids(tokenizer, histories[i]) for i in active], model, tokenizer, max_new_tokens)
        for i, answer in zip(active, answers):
            histories[i].append({"role": "assistant", "content": answer.text})
            finish[i] = answer.finish_reason
            if answer.finish_reason == "length":
                waiting[i] = []
    return [
        {
            "id": _row_id(row),
            "domain": "",
            **{k: v for k, v in row.data.items() if k != "conversations"},
            "messages": history,
            "finish_reason": reason,
        }
        for (row, _), history, reason in zip(batch, histories, finish)
    ]


def _read_prompts(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[int, tuple[list[Message], int]], dict[int, dict]]:
    """(index → what `_prompt` makes of the row, index → the line written for a row that cannot be prompted)."""
    prompts, refused, examples = {}, {}, {}
    for index, row in enumerate(rows):
        try:
            prompts[index] = _prompt(row, tokenizer)
        except Unrenderable as error:
            examples.setdefault(str(error), row.origin)
            refused[index] = {"id": _row_id(row), "refused": str(error), "origin": row.origin, "row": row.data}
    if not prompts:
        reasons = describe(Counter(line["refused"] for line in refused.values()), examples) or "there are no rows"
        raise UserError(f"no prompt can be answered: {reasons}", fix="rows need `messages` with a user turn")
    return prompts, refused


def _prompt(row: Row, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Message], int]:
    """(the row's turns, with an empty assistant turn wherever the target has to answer, the last turn always being one;
    the number of tokens before its first answer)."""
    messages: list[Message] = []
    for message in conversation(row, answered=False).messages:
        if message["role"] == "assistant":
            if messages[-1]["role"] == "assistant":
                continue  # two answers in a row: the target gives one
            message = {"role": "assistant", "content": ""}
        messages.append(message)
    if messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    first = [m["role"] for m in messages].index("assistant")
    return messages, len(prompt_ids(tokenizer, messages[:first]))


def _row_id(row: Row) -> str:
    return str(row.data["id"]) if isinstance(row.data, dict) and "id" in row.data else row.origin


def _first_difference(row: Conversation, answer: _Answer, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Index of the first token at which the answer differs from the row's last one; None where they agree.

    The row's text is tokenised anew, which may cut it in another way than the target wrote it: equal text agrees.
    """
    if answer.text == row.messages[-1]["content"] and row.truncated == (answer.finish_reason == "length"):
        return None
    ids, _ = render(tokenizer, row.messages, row.truncated)
    expected = ids[len(prompt_ids(tokenizer, row.messages[:-1])) :]
    return next((i for i, (a, b) in enumerate(zip(expected, answer.ids)) if a != b), None)


@contextmanager
def _generation_config(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """`generate` fills what a given config leaves open from the model's own: for its time the model has no other."""
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own


def _fingerprint(
    rows: Sequence[Row], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int
) -> str:
    """Of everything that the answers depend on; the weights by a sample of each tensor."""
    digest = hashlib.sha256(f"{max_new_tokens} {tokenizer.chat_template} {len(tokenizer)} {model.dtype}".encode())
    for row in rows:
        digest.update(json.dumps(row.data, sort_keys=True, default=str).encode())
    for name, weight in model.named_parameters():
        digest.update(f"{name} {weight.flatten()[:16].tolist()}".encode())
    return digest.hexdigest()[:12]


def _read_partial(partial: Path) -> dict[int, dict]:
    """index → line of the rows answered before. What a kill left half-written at the end is cut off the file."""
    if not partial.exists():
        return {}
    done, whole = {}, 0
    with partial.open("rb+") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            entry = json.loads(raw)
            done[entry["index"]] = entry["line"]
            whole += len(raw)
        file.truncate(whole)
    return done


def _write_atomically(out: Path, lines: list[dict]) -> None:
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(out)
