"""Conversation → token ids and loss mask, by the target's own chat template and nothing else.

One rendering serves training, generation and evaluation. A trained turn is what follows the rendering of the turns
before it with the generation prompt: the prompt's tokens, then the answer's. A template's own generation markers say
which of the answer's tokens are trained on; without markers it is all of them, up to the end of the turn. Text that
looks like a header of the template is therefore never taken for one.

Turns make one document as long as each prompt continues, token for token, the document so far. Where it does not
(reasoning is stripped from earlier turns, an answer merges with its header), another document begins, so that
every answer is trained on after exactly the tokens that decoding will see before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from .messages import Conversation, Message
from .quarantine import Unrenderable
from .templates import TODAY, ChatTemplate, Spans, chat_template, shared_end, shared_start
from .visible import check_answer, check_special_text, check_turns

if TYPE_CHECKING:  # it brings torch with it, which takes the processes that render seconds
    from transformers import GenerationConfig

Rendered = tuple[list[int], list[bool]]


@dataclass(frozen=True)
class RenderOptions:
    """train_on: all turns of the roles, or the last one. roles: whose turns are trained on.

    reasoning: train (as the template shows it), context (shown and not trained on), drop (taken out of the row).
    """

    train_on: str = "all"
    roles: tuple[str, ...] = ("assistant",)
    reasoning: str = "train"


@dataclass(frozen=True)
class _Answer:
    """A trained turn: the text before it, its own text up to its end, and the parts of that which are trained on.

    context: so many characters from its beginning are not, nor is a token that begins within them.
    ids: the tokens that the target itself wrote, which take the place of the text.
    """

    prompt: str
    text: str = ""
    trained: Spans = field(default_factory=list)
    context: int = 0
    ids: list[int] | None = None


@dataclass
class _Document:
    """text: what the ids stand for. whole: the ids are the tokenisation of the text."""

    text: str
    ids: list[int]
    mask: list[bool]
    whole: bool = True


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: list[dict] | None = None,
    day: datetime = TODAY,
) -> list[int]:
    """Token ids of the messages with the generation prompt: what the target continues with its answer.

    day: for templates that write it; a run's is always the same.
    Raises Unrenderable when the template refuses the messages.
    """
    template = chat_template(tokenizer)
    return template.encode(template.text(messages, tools, prompt=True, day=day)[0])


def render_documents(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, options: RenderOptions | None = None
) -> list[Rendered]:
    """(token ids [n], loss mask [n]) of each document of a conversation that ends with an assistant's turn; True where
    a token is trained on. A document ends with its last trained turn.

    An answer that was cut by a limit gets no end of turn. Raises Unrenderable, with the reason, when the template
    refuses or leaves something out, and when an answer is not what its generation prompt continues.
    """
    options = options or RenderOptions()
    template, tools = chat_template(tokenizer), conversation.tools
    messages = conversation.messages
    if options.reasoning != "train":
        messages = [_with_reasoning_apart(m, options.reasoning == "drop") for m in messages]
    check_special_text(template, messages, tools)
    turns = [i for i, m in enumerate(messages) if m["role"] in options.roles and m.get("weight") != 0]
    if not turns:
        raise Unrenderable("no turn is to be trained on")
    documents: list[_Document] = []
    for turn in turns if options.train_on == "all" else turns[-1:]:
        cut = conversation.truncated and turn == len(messages) - 1
        answer = _answer(template, messages[: turn + 1], tools, cut, options.reasoning == "context")
        document = _continued(template, documents[-1] if documents else None, answer.prompt)
        if not documents or document is not documents[-1]:
            documents.append(document)
        _append(template, document, answer)
    check_turns(messages[:turn], tools, documents[-1].text)
    return [(d.ids, d.mask) for d in documents]


def stop_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None) -> list[int]:
    """The token ids that end an answer, ascending: the template's end of turn, the tokenizer's and the model's own."""
    own = generation_config.eos_token_id if generation_config is not None else None
    template = chat_template(tokenizer)
    after, of_turn = template.ending
    ids = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own]), *template.encode(after[:of_turn])[-1:]}
    return sorted(i for i in ids if i is not None)


def _answer(
    template: ChatTemplate, messages: Sequence[Message], tools: list[dict] | None, cut: bool, reasoning_is_context: bool
) -> _Answer:
    """The last of the messages as a turn to train on. cut: it was cut by a limit."""
    *before, message = messages
    by_assistant = message["role"] == "assistant"
    if by_assistant:
        prompt, _ = template.text(before, tools, prompt=True)
    else:
        prompt, after = _around(template, before, message, tools)
    if "token_ids" in message:
        if max(message["token_ids"]) >= len(template.tokenizer):
            raise Unrenderable("a turn's token_ids are outside the tokenizer's vocabulary")
        return _Answer(prompt, ids=message["token_ids"])
    whole, marked = template.text(messages, tools)
    if not whole.startswith(prompt):
        raise Unrenderable("the answer's rendering does not begin with the generation prompt")
    text = whole[len(prompt) :]
    check_answer(message, prompt, text)
    if by_assistant:
        content, end = template.end_of_answer(text)
    else:
        content = len(text) - len(after)
        end, marked = content + template.end_of_turn(after), None
    trained = [(0, end)]
    if marked is not None:
        trained = [(max(0, a - len(prompt)), b - len(prompt)) for a, b in marked if b > len(prompt)]
        if not trained:
            raise Unrenderable("the template's generation markers leave this answer out")
        end = max(b for _, b in trained)
    context = 0
    if reasoning_is_context and message.get("reasoning"):
        context = len(text) - len(_after_reasoning(template, before, message, tools))
    end = content if cut else end
    trained = [(a, min(end, b)) for a, b in trained if a < end and b > context]
    if not trained:
        raise Unrenderable("nothing of an answer is left to train on")
    return _Answer(prompt, text[:end], trained, context)


def _around(
    template: ChatTemplate, before: Sequence[Message], message: Message, tools: list[dict] | None
) -> tuple[str, str]:
    """(what the template writes up to a turn's content, what it writes after it): all that two contents share."""
    one, other = (template.text([*before, {**message, "content": c}], tools)[0] for c in ("x", "7"))
    return shared_start(one, other), shared_end(one, other)


def _after_reasoning(
    template: ChatTemplate, before: Sequence[Message], message: Message, tools: list[dict] | None
) -> str:
    """What the template writes after a turn's reasoning: all that two reasonings share."""
    one, other = (template.text([*before, {**message, "reasoning": r}], tools)[0] for r in ("x", "7"))
    return shared_end(one, other)


def _with_reasoning_apart(message: Message, dropped: bool) -> Message:
    """The turn with its reasoning in a field of its own, even if it opens the content as a think block; or without it.
    Tokens of the target's own, which hold both, give way to the text."""
    block, closed, rest = message["content"].partition("</think>")
    if message["role"] == "assistant" and closed and block.lstrip().startswith("<think>"):
        reasoning = block.lstrip().removeprefix("<think>").strip("\n")
        message = {**message, "content": rest.lstrip("\n"), "reasoning": reasoning}
        if not rest.strip() and "tool_calls" not in message:
            raise Unrenderable("an answer is empty without its reasoning")
    if "reasoning" not in message:
        return message
    taken = ("token_ids", "reasoning") if dropped else ("token_ids",)
    return {key: value for key, value in message.items() if key not in taken}


def _continued(template: ChatTemplate, document: _Document | None, prompt: str) -> _Document:
    """The document, gone on to the end of the prompt, if the prompt's tokens begin with its tokens; or a new one."""
    ids = None
    if document is not None:
        if document.whole and prompt.startswith(document.text) and template.isolates(document.text):
            ids = document.ids + template.encode(prompt[len(document.text) :])  # the beginning is tokenised once
        else:
            ids = template.encode(prompt)
        if ids[: len(document.ids)] == document.ids:
            document.mask += [False] * (len(ids) - len(document.ids))
            document.text, document.ids, document.whole = prompt, ids, True
            return document
    ids = template.encode(prompt) if ids is None else ids
    return _Document(prompt, ids, [False] * len(ids))


def _append(template: ChatTemplate, document: _Document, answer: _Answer) -> None:
    """The answer's tokens and mask, put at the end of a document that ends with the answer's prompt.

    They are those of one tokenisation of prompt and answer if its tokens begin with the prompt's; else the answer is
    tokenised by itself, as decoding writes it: no token of an answer can reach back into its prompt.
    """
    if answer.ids is not None:
        document.ids = document.ids + answer.ids
        document.mask += [True] * len(answer.ids)
        document.whole = False
        return
    characters, tokens = _anchor(template, document)
    segment, header = document.text[characters:], document.ids[tokens:]
    ids = template.encode(segment + answer.text)
    apart = ids[: len(header)] != header
    if apart:
        merged, ids, segment = ids, template.encode(answer.text), ""
        if template.tokenizer.decode(header + ids) != template.tokenizer.decode(merged):
            raise Unrenderable("an answer's tokens cannot be told from its header's")
    else:
        ids = ids[len(header) :]
    if answer.trained == [(0, len(answer.text))] and not answer.context:
        document.mask += [True] * len(ids)
    else:
        offsets = template.offsets(segment + answer.text)[-len(ids) :]
        document.mask += _within(answer, [(a - len(segment), b - len(segment)) for a, b in offsets])
    document.text, document.ids, document.whole = document.text + answer.text, document.ids + ids, not apart


def _anchor(template: ChatTemplate, document: _Document) -> tuple[int, int]:
    """(characters, tokens) of the document up to the last special token, if what follows is tokenised as if nothing
    stood before it; (0, 0) otherwise."""
    names = template.tokens_of_special
    last = next((i for i in range(len(document.ids) - 1, -1, -1) if document.ids[i] in names), None)
    if last is None or not document.whole or not template.isolates(names[document.ids[last]]):
        return 0, 0
    token = names[document.ids[last]]
    return document.text.rindex(token) + len(token), last + 1


def _within(answer: _Answer, offsets: Spans) -> list[bool]:
    """Which tokens are trained on, by the characters of the answer that each stands for: those that lie, wholly or in
    part, in a trained span, and begin after the context."""
    trained = [False] * len(offsets)
    for start, end in answer.trained:
        inside = [i for i, (a, b) in enumerate(offsets) if b > start and a < end]
        if inside:
            first, last = inside[0], inside[-1]
            trained[first : last + 1] = [True] * (last + 1 - first)
    return [on and a >= answer.context for on, (a, _) in zip(trained, offsets)]
