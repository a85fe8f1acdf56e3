"""Conversation → token ids and loss mask, by the target's own chat template and nothing else.

One rendering serves training, generation and evaluation. What is trained on follows from token ids, never from text:
the rendering of the turns before an answer, with the generation prompt, must be a prefix of the rendering of the turns
up to the answer; what comes after the prefix is the answer. User text that looks like a header of the template
therefore stays user text.

Where an answer ends: the template is asked once, with two made-up answers, what it puts after an answer; the first
special token in there is the end of the turn. It is trained on; what the template adds after it (a newline, mostly) is
not. A template that puts no special token there has no end of turn, and the answer alone is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..errors import UserError

Message = dict[str, str]
Rendered = tuple[list[int], list[bool]]


class Unrenderable(Exception):
    """A conversation that cannot be trained on; the text is the reason, the same for all rows of its kind."""


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError for a tokenizer without a chat template: no rendering of our own is put in its place."""
    if not tokenizer.chat_template:
        raise UserError(
            "the target's tokenizer has no chat template",
            where=str(tokenizer.name_or_path),
            fix="use an instruct model, or put a chat_template.jinja into the target's folder",
        )


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Token ids of the messages with the generation prompt: what the target continues with its answer.

    Raises Unrenderable when the template refuses the messages.
    """
    return _template(tokenizer, messages, add_generation_prompt=True)


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], truncated_last: bool = False) -> Rendered:
    """(token ids [n], loss mask [n]) of a whole conversation; True where the assistant wrote the token.

    messages end with an assistant turn. truncated_last: the last answer was cut by a limit, so it gets no end of turn:
    the document ends with its last token.
    Raises Unrenderable when the template refuses, when the tokens before an answer are not those of its generation
    prompt, or when the template renders a turn in another way once more turns follow (see `render_documents`).
    """
    ids = _template(tokenizer, messages)
    mask = [False] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        until = ids if turn == len(messages) - 1 else _template(tokenizer, messages[: turn + 1])
        start, content, end = _answer_span(tokenizer, messages[:turn], until)
        if ids[:end] != until[:end]:
            raise Unrenderable("the template rewrites earlier turns when more follow")
        if turn == len(messages) - 1:
            end = content if truncated_last else end
            ids, mask = (ids[:end], mask[:end]) if truncated_last else (ids, mask)
        mask[start:end] = [True] * (end - start)
    return ids, mask


def render_documents(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], truncated_last: bool = False
) -> list[Rendered]:
    """The conversation as one document; or, where the template rewrites history (reasoning stripped from earlier turns,
    say), as one document per assistant turn, each as decoding will see it, with only its last answer trained on."""
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    try:
        return [render(tokenizer, messages, truncated_last)]
    except Unrenderable:
        if len(turns) < 2:
            raise
    documents = []
    for turn in turns:
        ids = _template(tokenizer, messages[: turn + 1])
        start, content, end = _answer_span(tokenizer, messages[:turn], ids)
        if truncated_last and turn == turns[-1]:
            ids, end = ids[:content], content
        documents.append((ids, [start <= i < end for i in range(len(ids))]))
    return documents


def stop_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None) -> list[int]:
    """The token ids that end an answer, ascending: the template's end of turn, the tokenizer's and the model's own."""
    own = generation_config.eos_token_id if generation_config is not None else None
    after, turn = _ending(tokenizer, tokenizer.get_chat_template())
    ids = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own]), *after[turn - 1 : turn]}
    return sorted(i for i in ids if i is not None)


def _answer_span(tokenizer: PreTrainedTokenizerBase, before: Sequence[Message], ids: list[int]) -> tuple[int, int, int]:
    """(start, end of content, end of turn) of the last answer in `ids`, the rendering of `before` and an answer.

    The end of turn includes the token that ends the turn; it equals the end of content where there is no such token.
    """
    prompt = _template(tokenizer, before, add_generation_prompt=True)
    start = len(prompt)
    if ids[:start] != prompt:
        raise Unrenderable("the answer's rendering does not begin with the generation prompt's tokens")
    after, turn = _ending(tokenizer, tokenizer.get_chat_template())
    content = len(ids) - len(after)
    if content <= start or tuple(ids[content:]) != after:
        raise Unrenderable("the template ends this answer in another way than others")
    return start, content, content + turn


@lru_cache(maxsize=8)
def _ending(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> tuple[tuple[int, ...], int]:
    """(the tokens that the template puts after a last answer, how many of them are of the turn, its end included).

    They are what two conversations with different answers end with. chat_template is the tokenizer's, for the cache.
    """
    user = {"role": "user", "content": "a"}
    one, other = (_template(tokenizer, [user, {"role": "assistant", "content": c}]) for c in ("x", "7"))
    shared = 0
    while shared < min(len(one), len(other)) and one[-1 - shared] == other[-1 - shared]:
        shared += 1
    after = one[len(one) - shared :]
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.update(tokenizer.all_special_ids)
    return tuple(after), next((n for n, token in enumerate(after, 1) if token in special), 0)


def _template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], add_generation_prompt: bool = False
) -> list[int]:
    plain = [{"role": m["role"], "content": m["content"]} for m in messages]  # no other column is a template's argument
    try:
        return tokenizer.apply_chat_template(
            plain, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
        )
    except Exception as error:  # a template is a program of its own: what it raises is about this conversation
        raise Unrenderable(f"the template raises: {error}") from error
