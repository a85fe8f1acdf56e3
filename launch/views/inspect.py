"""`draftsmith inspect`: what of a run's rows is trained on, token by token, and what was quarantined and why.

It shows the very documents that the run trains on, not another rendering of the rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from data_pipelines.conversations.dataset import training_data
from data_pipelines.documents import Document, Documents
from data_pipelines.engines import resolve_target
from data_pipelines.errors import UserError
from data_pipelines.files import write_text_atomically
from data_pipelines.run_folder import RunFolder
from trainer.config import RunConfig, load_config

_TRAINED = "bold green"
_MOST_CHARACTERS = 4000  # of one document or row on a terminal
# What would move the cursor, or end the page, is shown as the picture of its code.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {127: 0x2421}


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a document, as text: all of them trained on, or none."""

    text: str
    trained: bool


@dataclass(frozen=True)
class Shown:
    """One document. tokens, trained: how many there are, and how many of them are trained on."""

    origin: str
    tokens: int
    trained: int
    pieces: list[Piece]

    @property
    def caption(self) -> str:
        share = self.trained / self.tokens
        return f"{self.origin} · {self.tokens:,} tokens · {self.trained:,} trained on ({share:.0%})"


@dataclass(frozen=True)
class Refused:
    """One quarantined row; row: as it was read, as JSON."""

    origin: str
    reason: str
    row: str


@dataclass
class Inspection:
    """title: which data, under which target. facts: numbers for people. reasons: (reason, rows, the first one)."""

    title: str
    facts: list[tuple[str, str]]
    reasons: list[tuple[str, int, str]]
    documents: list[Shown] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)


def command(arguments: argparse.Namespace) -> None:
    if arguments.rows < 1:
        raise UserError(f"--rows {arguments.rows} is less than 1")
    config = load_config(arguments.recipe, arguments.overrides, arguments.config_dir)
    found = examine(config, arguments.rows)
    print_inspection(found, Console(highlight=False, soft_wrap=True), quarantined=arguments.quarantined)
    if arguments.html:
        write_html(found, Path(arguments.html))
        print(f"the page: {arguments.html}")


def examine(config: RunConfig, rows: int) -> Inspection:
    """Prepares the run's data, unless that is done, and picks `rows` rows, spread evenly, of those that are trained on
    and of those that are not (of these one for each reason first)."""
    run_dir = Path(config.run_dir)
    target = resolve_target(config.target)
    tokenizer = target.load_tokenizer()
    # However many rows are bad, a person who looks at them wants to see them.
    data = replace(config.data, max_quarantined_fraction=1.0)
    prepared = training_data(data, target, tokenizer, run_dir, config.seed)
    counts = prepared.counts
    facts = [
        ("rows", f"{counts.rows:,}: {counts.trained:,} trained on, {counts.quarantined:,} quarantined"),
        ("documents", f"{counts.documents:,}, {counts.tokens / max(1, counts.documents):,.0f} tokens on average"),
        ("tokens", f"{counts.tokens:,}, {counts.supervised:,} trained on ({counts.supervised / counts.tokens:.0%})"),
    ]
    facts += [("repaired", f"{n:,} rows: {rule}") for rule, n in counts.repairs.items()]
    reasons = [(r, n, counts.examples[r]) for r, n in sorted(counts.reasons.items(), key=lambda item: -item[1])]
    return Inspection(
        f"{config.data.path}, rendered for {target.name}",
        facts,
        reasons,
        [show(tokenizer, document) for document in _spread(prepared.documents, rows)],
        list(_refused(RunFolder(run_dir).quarantine, rows)),
    )


def show(tokenizer: PreTrainedTokenizerBase, document: Document) -> Shown:
    """The document's text, cut where what is trained on begins and ends."""
    ids, mask = document.input_ids.tolist(), document.loss_mask.tolist()
    pieces, end, before = [], 0, ""
    for trained, run in groupby(mask):
        end += len(list(run))
        whole = tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False)
        # Half of a letter at the end of a piece is another text than with its other half.
        common = next((i for i, (a, b) in enumerate(zip(before, whole)) if a != b), min(len(before), len(whole)))
        pieces.append(Piece(whole[common:].translate(_PICTURES), trained))
        before = whole
    return Shown(document.origin, len(ids), sum(mask), pieces)


def print_inspection(found: Inspection, console: Console, *, quarantined: bool = False) -> None:
    """What is trained on in colour, or in brackets where there is no colour."""
    console.print(f"[bold]{escape(found.title)}[/]")
    for name, value in found.facts:
        console.print(f"  {name:<10} {escape(value)}")
    for document in () if quarantined else found.documents:
        console.print(f"\n[dim]{escape(document.caption)}[/]")
        console.print(_cut(_coloured(document, console.color_system is not None)))
    for refused in found.refused if quarantined else ():
        console.print(f"\n[dim]{escape(refused.origin)}[/] · [red]{escape(refused.reason)}[/]")
        console.print(_cut(Text(refused.row)))
    if found.reasons:
        table = Table(title="quarantined", title_justify="left", box=None, pad_edge=False)
        for heading, justify in (("rows", "right"), ("reason", "left"), ("the first", "left")):
            table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
        for reason, count, first in found.reasons:
            table.add_row(f"{count:,}", escape(reason), escape(first))
        console.print()
        console.print(table, soft_wrap=False)


def write_html(found: Inspection, path: Path) -> None:
    """One file that needs nothing else. Whatever the rows hold is escaped."""
    page = resources.files("launch.views").joinpath("inspect.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    write_text_atomically(path, environment.from_string(page).render(found=found))


def _spread(documents: Documents, rows: int) -> Iterator[Document]:
    """All documents of `rows` rows, or of all rows if there are fewer."""
    begins = (np.diff(documents.names) != 0) | (np.diff(documents.numbers) != 0)
    firsts = np.flatnonzero(np.concatenate([[True], begins]))
    ends = np.append(firsts[1:], len(documents))
    chosen = np.arange(min(rows, len(firsts))) * len(firsts) // min(rows, len(firsts))
    for first, end in zip(firsts[chosen], ends[chosen]):
        yield from (documents[i] for i in range(first, end))


def _refused(path: Path, rows: int) -> list[Refused]:
    by_reason: dict[str, list[Refused]] = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            held: dict[str, Any] = json.loads(line)
            same = by_reason.setdefault(held["reason"], [])
            if len(same) < rows:
                same.append(Refused(held["origin"], held["reason"], _json(held["row"])))
    rounds = [same[n] for n in range(rows) for same in by_reason.values() if n < len(same)]
    return rounds[:rows]


def _json(row: Any) -> str:
    text = row if isinstance(row, str) else json.dumps(row, ensure_ascii=False, indent=1)
    return text.encode("utf-8", "backslashreplace").decode().translate(_PICTURES)


def _coloured(document: Shown, colour: bool) -> Text:
    text = Text()
    for piece in document.pieces:
        if piece.trained and colour:
            text.append(piece.text.replace("\n", "⏎\n"), _TRAINED)
        else:
            text.append(f"⟦{piece.text}⟧" if piece.trained else piece.text)
    return text


def _cut(text: Text) -> Text:
    more = len(text) - _MOST_CHARACTERS
    return text[:_MOST_CHARACTERS].append(f"\n… {more:,} characters more", "dim") if more > 0 else text
