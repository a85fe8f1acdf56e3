"""What a row holds, by its keys: which of the known shapes it has, and what conversation, text or tokens lie in it.

| shape | keys |
|---|---|
| `tokens` | `input_ids`, and which are trained on: `loss_mask`, or `labels` with -100 elsewhere |
| `traffic` | `request` and `response` of an OpenAI-compatible server (`traffic.py`) |
| `messages` | `messages`: turns of `role` and `content` |
| `sharegpt` | `conversations`: turns of `from` and `value` |
| `pairs` | a prompt and its answer, by one of the names in `PAIRS` |
| `text` | `text`: all of it is trained on |

The first of these that a row has keys for is its shape: a row of `messages` that repeats its `prompt` is a row of
messages, and the `text` beside a pair is taken for the same thing rendered. Two of the first four at once, or two pairs,
are refused with the keys' names, because nothing says which of them is meant; `data.format` and `data.pair` say it.
"""

from __future__ import annotations

from typing import Any

from ..errors import UserError, check_choice
from .quarantine import Unrenderable
from .traffic import exchange, is_traffic

PAIRS = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("prompt", "answer"),
    ("prompt", "chosen"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "answer"),
    ("query", "response"),
    ("input", "output"),
    ("problem", "solution"),
)
SHAPES = ("tokens", "traffic", "messages", "sharegpt", "pairs", "text")
# What makes a row one of another shape than `messages`.
SHAPE_KEYS = frozenset({"input_ids", "loss_mask", "labels", "request", "response", "conversations"})
# What an instruction is about, put below it; and what is said before it.
_BELOW, _SYSTEM = {"instruction": ("input", "context")}, ("system", "system_prompt")


def check_format(name: str, pair: str) -> None:
    """Raises UserError unless they are values of data.format and data.pair."""
    check_choice("data.format", name, ("auto", *SHAPES))
    if pair and (len(keys := pair.split("/")) != 2 or not all(keys)):
        raise UserError(f"data.pair={pair} is not two keys", fix="data.pair=<key of the prompt>/<key of the answer>")
    if pair and name not in ("auto", "pairs"):
        raise UserError(f"data.pair={pair} is only of use with data.format=pairs, not {name}")


def shape_of(data: dict, forced: str = "auto", pair: str = "") -> str:
    """forced, pair: data.format and data.pair. Raises Unrenderable when the keys say nothing, or two things."""
    if forced != "auto":
        return forced
    if pair:
        return "pairs"
    whole = {
        "tokens": "input_ids" in data,
        "traffic": is_traffic(data),
        "messages": "messages" in data,
        "sharegpt": "conversations" in data,
    }
    found = [shape for shape, there in whole.items() if there]
    if len(found) > 1:
        raise Unrenderable(f"the row is of two shapes, {' and '.join(found)}: data.format says which")
    if found:
        return found[0]
    if _pairs_in(data):
        return "pairs"
    if isinstance(data.get("text"), str):
        return "text"
    if "request" in data or "response" in data:
        raise Unrenderable("a request without its response, or the other way round")
    raise Unrenderable(
        f"the row has no messages, nor another known shape; its keys: {', '.join(sorted(map(str, data)))}"
    )


def turns_of(data: dict, shape: str, pair: str, repairs: list[str]) -> dict[str, Any]:
    """The row as {"messages": list of turns, "tools"?, "finish_reason"?}, turns as they are in the row."""
    if shape == "messages":
        return data
    if shape == "sharegpt":
        return {**data, "messages": data.get("conversations")}
    if shape == "traffic":
        if not is_traffic(data):
            raise Unrenderable("the row has no request and response")
        return exchange(data)
    return {**data, "messages": _pair_turns(data, pair, repairs)}


def _pairs_in(data: dict) -> list[tuple[str, str]]:
    """The pairs that the row has, or a prompt that waits for its answer (of whatever name).

    What an instruction is about (`input`) is no prompt of its own.
    """
    found = [(prompt, answer) for prompt, answer in PAIRS if prompt in data and answer in data]
    if ("instruction", "output") in found:
        return [pair for pair in found if pair != ("input", "output")]
    return found or list({prompt: (prompt, answer) for prompt, answer in PAIRS if prompt in data}.values())


def _pair_turns(data: dict, pair: str, repairs: list[str]) -> list:
    pairs = [tuple(pair.split("/"))] if pair else _pairs_in(data)
    if not pairs:
        raise Unrenderable(f"the row has no prompt and answer; its keys: {', '.join(sorted(map(str, data)))}")
    if len(pairs) > 1:
        named = " and ".join("/".join(p) for p in pairs)
        raise Unrenderable(f"the row has two pairs, {named}: data.pair says which")
    prompt_key, answer_key = pairs[0]
    if prompt_key not in data:
        raise Unrenderable(f"the row has no {prompt_key}")
    prompt, answer = data[prompt_key], data.get(answer_key)
    below = next((data[k] for k in _BELOW.get(prompt_key, ()) if isinstance(data.get(k), str) and data[k].strip()), "")
    if isinstance(prompt, str) and below:
        prompt = f"{prompt}\n\n{below}"
    turns = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if isinstance(answer, list) and answer_key == "chosen" and answer[: len(turns)] == turns:
        answer = answer[len(turns) :]  # pairs of preferences repeat the prompt in the answer
        repairs.append("prompt repeated in the answer left out")
    if answer is not None:
        turns = [*turns, *(answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}])]
    system = next((data[k] for k in _SYSTEM if isinstance(data.get(k), str) and data[k].strip()), "")
    return [{"role": "system", "content": system}, *turns] if system else turns


def tokens_of(data: dict, vocabulary: int, repairs: list[str]) -> tuple[list[int], list[bool]]:
    """(token ids [n], loss mask [n]) of a row that is tokenised already. vocabulary: ids are below it.

    A row without a mask is trained on throughout; that is counted among the repairs.
    """
    ids = data.get("input_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise Unrenderable("input_ids is not a list of whole numbers")
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        raise Unrenderable("input_ids holds an id outside the tokenizer's vocabulary")
    if "loss_mask" in data:
        mask = data["loss_mask"]
        if not isinstance(mask, list) or any(m not in (0, 1) for m in mask):
            raise Unrenderable("loss_mask is not a list of 0 and 1")
    elif "labels" in data:
        mask = data["labels"]
        if not isinstance(mask, list) or len(mask) != len(ids) or any(m not in (-100, i) for m, i in zip(mask, ids)):
            raise Unrenderable("labels are not the input_ids with -100 where nothing is trained on")
        mask = [m != -100 for m in mask]
    else:
        mask = [True] * len(ids)
        repairs.append("input_ids without loss_mask trained on throughout")
    if len(mask) != len(ids):
        raise Unrenderable("input_ids and loss_mask differ in length")
    return ids, [bool(m) for m in mask]
