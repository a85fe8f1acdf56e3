"""A tokenizer's chat template: the text that it makes of a conversation, that text's tokens, and how answers end in it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ..errors import UserError
from .messages import REASONING, Message
from .quarantine import Unrenderable

Spans = list[tuple[int, int]]

# Templates that write the day write this one: a run has the same tokens whenever it is started.
TODAY = datetime(2025, 1, 1)

_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_PROBE = {"type": "function", "id": "a0b1c2d3e", "function": {"name": "probe_name", "arguments": {"key": True}}}


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError for a tokenizer without a chat template: no rendering of our own is put in its place."""
    if not tokenizer.chat_template:
        raise UserError(
            "the target's tokenizer has no chat template",
            where=str(tokenizer.name_or_path),
            fix="use an instruct model, or put a chat_template.jinja into the target's folder",
        )


def chat_template(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """The tokenizer's template, examined once for each that it carries."""
    return _examined(tokenizer, json.dumps(tokenizer.chat_template), len(tokenizer))


@lru_cache(maxsize=8)
def _examined(tokenizer: PreTrainedTokenizerBase, source: str, size: int) -> ChatTemplate:
    del source, size  # for the cache: a tokenizer can be given another template, or more tokens
    return ChatTemplate(tokenizer)


class ChatTemplate:
    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | {*tokenizer.all_special_ids}
        self.tokens_of_special = {i: token for i in ids if (token := tokenizer.convert_ids_to_tokens(i))}
        self.special = {token: i for i, token in self.tokens_of_special.items()}
        longest_first = sorted(self.special, key=len, reverse=True)
        self._any_special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._isolates: dict[str, bool] = {}

    def text(
        self,
        messages: Sequence[Message],
        tools: list[dict] | None = None,
        *,
        prompt: bool = False,
        day: datetime = TODAY,
    ) -> tuple[str, Spans | None]:
        """(the template's text, the spans that its generation markers enclose; None for a template without any).

        prompt: with the generation prompt. day: for templates that write it.
        Raises Unrenderable when the template refuses the conversation.
        """
        empty, as_text = self._tool_calls if any("tool_calls" in m for m in messages) else ("", False)
        return self._render([_turn(m, empty, as_text) for m in messages], tools, prompt, day)

    def _render(
        self, turns: list[dict], tools: list[dict] | None, prompt: bool, day: datetime = TODAY
    ) -> tuple[str, Spans | None]:
        try:
            source = self.tokenizer.get_chat_template(None, tools)
            marked = bool(_MARKER.search(source)) and not prompt
            texts, spans = render_jinja_template(
                conversations=[turns],
                tools=tools,
                chat_template=source,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompt,
                strftime_now=day.strftime,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:  # a template is a program of its own: what it raises is about this conversation
            reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
            raise Unrenderable(f"the template raises: {reason}") from error
        return texts[0], spans[0] if marked else None

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]

    def offsets(self, text: str) -> Spans:
        """The characters that each of the text's tokens stands for."""
        if not self.tokenizer.is_fast:
            raise Unrenderable("a part of an answer is trained on, which needs a tokenizer of the fast kind")
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return encoded["offset_mapping"]

    def special_in(self, text: str) -> str | None:
        """The first special token that is written out in the text."""
        found = self._any_special.search(text)
        return found.group() if found else None

    def isolates(self, text: str) -> bool:
        """Whether what follows this text is tokenised as if nothing stood before it: the text ends with a special
        token, and that token neither swallows white space nor decides whether a word begins after it."""
        token = next((t for t in self.special if text.endswith(t)), None)
        if token is None:
            return False
        if token not in self._isolates:
            alone, after = self.encode(token), ["a", " a", "\n", "\n\na", "  \n a", "\u00e9", "<"]
            after += list(self.special)[:16]
            self._isolates[token] = all(self.encode(token + t) == alone + self.encode(t) for t in after)
        return self._isolates[token]

    @cached_property
    def ending(self) -> tuple[str, int]:
        """(the text that the template puts after a last answer, how much of it is of the turn: its end token, or 0).

        It is what the renderings of two conversations with different answers end with. Where it begins with several
        special tokens, the turn ends with the tokenizer's end token if that is one of them, else with the last.
        """
        user = {"role": "user", "content": "a"}
        one, other = (self.text([user, {"role": "assistant", "content": c}])[0] for c in ("x", "7"))
        after = shared_end(one, other)
        return after, self.end_of_turn(after)

    def end_of_turn(self, after: str) -> int:
        """How many characters of the text after a turn's content belong to the turn."""
        end = 0
        while found := self._any_special.match(after, end):
            end = found.end()
            if self.special[found.group()] == self.tokenizer.eos_token_id:
                break
        return end

    def end_of_answer(self, text: str) -> tuple[int, int]:
        """(where the content ends, where the turn ends) in the text that follows a generation prompt.

        An answer that ends otherwise than plain ones (a tool call, say) ends with its last special token.
        """
        after, of_turn = self.ending
        if text.endswith(after):
            content = len(text) - len(after)
            return content, content + of_turn
        found = list(self._any_special.finditer(text))
        if not found or text[found[-1].end() :].strip():
            raise Unrenderable("the template ends this answer in another way than others")
        return found[-1].span()

    @cached_property
    def _tool_calls(self) -> tuple[str | None, bool]:
        """(what a tool call's empty content has to be, whether its arguments have to be JSON text): the first way in
        which the template shows a made-up call, and shows it as JSON."""
        user = {"role": "user", "content": "a"}
        for empty in ("", None):
            for as_text in (False, True):
                call = _turn({"role": "assistant", "content": "", "tool_calls": [_PROBE]}, empty, as_text)
                try:
                    text, _ = self._render([user, call], None, False)
                except Unrenderable:
                    continue
                if "probe_name" in text and "key" in text and "{'key'" not in text:
                    return empty, as_text
        return "", False


def _turn(message: Message, empty: str | None, as_text: bool) -> dict[str, Any]:
    """The turn as templates know it. No other column is a template's argument."""
    turn = {key: message[key] for key in ("role", "content", "name", "tool_call_id") if key in message}
    if message.get("reasoning"):
        turn |= dict.fromkeys(REASONING, message["reasoning"])
    if "tool_calls" in message:
        turn["content"] = message["content"] or empty
        calls = [{**call, "function": {**call["function"]}} for call in message["tool_calls"]]
        for call in calls if as_text else ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        turn["tool_calls"] = calls
    return turn


def shared_start(one: str, other: str) -> str:
    length = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    return one[:length]


def shared_end(one: str, other: str) -> str:
    return shared_start(one[::-1], other[::-1])[::-1]
