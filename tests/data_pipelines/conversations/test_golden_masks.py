"""What is trained on, for every row of `nasty_rows` under every template of `chat_templates`: `golden_masks.txt`.

A line gives the templates and what is trained on: `‹answer›` is an answer with all that its template puts around it up
to the end of the turn; `‹answer…` has no end; anything else is written out. ` / ` stands between turns of one document,
` || ` between documents, and `✗` before the reason of a quarantined row.
After a change on purpose:  python -m tests.data_pipelines.conversations.test_golden_masks
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from data_pipelines.conversations.quarantine import Unrenderable
from data_pipelines.conversations.rendering import render_documents
from data_pipelines.conversations.rows import Row, conversation
from tests.data_pipelines.conversations.chat_templates import FAMILIES, tokenizer_of, trained_texts
from tests.data_pipelines.conversations.nasty_rows import ROWS

GOLDEN = Path(__file__).with_name("golden_masks.txt")


def cell(family: str, row: str) -> str:
    tokenizer = tokenizer_of(family)
    try:
        documents = render_documents(tokenizer, conversation(Row(ROWS[row], "test:1")))
    except Unrenderable as error:
        return f"✗ {error}"
    return " || ".join(" / ".join(_short(family, t) for t in trained_texts(tokenizer, d)) for d in documents)


def _short(family: str, text: str) -> str:
    opens, ends = FAMILIES[family].opens, FAMILIES[family].ends
    if not text.startswith(opens):
        return repr(text)[1:-1]
    if ends and text.endswith(ends):
        return f"‹{repr(text[len(opens) : -len(ends)])[1:-1]}›"
    return f"‹{repr(text[len(opens) :])[1:-1]}{'…' if ends else '›'}"


def block(row: str) -> str:
    """The row's lines of the table: the templates that agree in one line, the most numerous first."""
    same = defaultdict(list)
    for family in FAMILIES:
        same[cell(family, row)].append(family)
    order = sorted(same.items(), key=lambda item: -len(item[1]))
    names = ["all" if len(order) == 1 else "others", *(" ".join(families) for _, families in order[1:])]
    if len(order) > 1 and len(order[0][1]) <= 2:
        names[0] = " ".join(order[0][1])
    return "\n".join([f"# {row}", *(f"  {name}: {text}" for name, (text, _) in zip(names, order))]) + "\n"


def golden() -> dict[str, str]:
    blocks = GOLDEN.read_text(encoding="utf-8").split("\n\n")
    return {b.partition("\n")[0].removeprefix("# "): b.strip("\n") + "\n" for b in blocks}


def test_there_are_as_many_as_promised():
    assert len(ROWS) >= 60 and len(FAMILIES) >= 12
    assert list(golden()) == list(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_what_is_trained_on(row):
    assert block(row) == golden()[row]


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(block(row) for row in ROWS), encoding="utf-8")
