"""One row → its documents, cut to the length that is allowed."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from .config import DataConfig
from .quarantine import Unrenderable
from .readers import Row
from .rendering import Rendered, RenderOptions, render_documents
from .rows import conversation, refuse_unreadable
from .shapes import shape_of, tokens_of


@dataclass
class RowDocuments:
    """documents: (token ids [n], loss mask [n]) each. shape: the row's (see `shapes`). repairs: the rules that changed
    it. clipped, split, left_out: see `Counts`."""

    documents: list[Rendered]
    shape: str
    repairs: list[str]
    clipped: int = 0
    split: int = 0
    left_out: int = 0


def row_documents(row: Row, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> RowDocuments:
    """Raises Unrenderable, with the reason, for a row that cannot be trained on."""
    refuse_unreadable(row)
    shape, repairs = shape_of(row.data, config.format, config.pair), []
    if shape == "tokens":
        rendered = [tokens_of(row.data, len(tokenizer), repairs)]
    elif shape == "text":
        rendered = [_text(row.data.get("text"), tokenizer)]
    else:
        talk = conversation(row, shape=shape, pair=config.pair)
        options = RenderOptions(config.train_on, tuple(config.roles), config.reasoning)
        rendered = render_documents(tokenizer, talk, options)
        repairs = talk.repairs
    made = RowDocuments([], shape, repairs)
    for ids, mask in rendered:
        _cut(ids, mask, config, made)
    if not made.documents:
        cut = f" within the first data.max_document_tokens={config.max_document_tokens}" if made.clipped else ""
        raise Unrenderable(f"no token is trained on{cut}")
    return made


def _text(text: object, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    """Plain text, with what the tokenizer itself puts around it; all of it is trained on."""
    if not isinstance(text, str):
        raise Unrenderable("the row has no text")
    if not text.strip():
        raise Unrenderable("the text is empty")
    ids = tokenizer.encode(text, verbose=False)
    return ids, [True] * len(ids)


def _cut(ids: list[int], mask: list[bool], config: DataConfig, made: RowDocuments) -> None:
    """Adds the document to `made`: whole, its beginning, or in pieces.

    A piece begins with the last token of the piece before it, as context for its own first label, so that every label
    is trained on once. A cut document has no end of turn that it did not reach. What nothing is trained on in is left
    out; a document's first token is no label, because nothing comes before it.
    """
    most = config.max_document_tokens
    if len(ids) <= most:
        pieces = [(ids, mask)]
    elif config.too_long == "quarantine":
        raise Unrenderable(f"longer than data.max_document_tokens={most}")
    elif config.too_long == "clip":
        pieces, made.clipped, made.left_out = [(ids[:most], mask[:most])], made.clipped + 1, len(ids) - most
    else:
        starts = range(0, len(ids) - 1, most - 1)
        pieces = [(ids[s : s + most], [mask[s] and not s, *mask[s + 1 : s + most]]) for s in starts]
        made.split += 1
    for piece in pieces:
        if any(piece[1][1:]):
            made.documents.append(piece)
        elif len(pieces) > 1:
            made.left_out += len(piece[0])
