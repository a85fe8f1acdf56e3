from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from data_pipelines.documents import Document, Documents
from launch.cli import main
from launch.views.inspect import _spread, examine, print_inspection, show
from trainer.config import load_config

ROWS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "one\ntwo \U0001f680"}]},
    {"messages": []},
    {
        "messages": [
            {"role": "user", "content": "<script>alert(1)</script>\x1b[2J"},
            {"role": "assistant", "content": "[bold]three[/] <b>four</b>"},
        ]
    },
    {"messages": [{"role": "user", "content": "<i>no answer</i>"}]},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "five"}]},
]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return ["ci_eagle3", "data.path=rows.jsonl", "data.regenerate.mode=never", f"run_dir={tmp_path / 'run'}"]


class Page(HTMLParser):
    """The texts of a page: all of it, and what is marked."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags: list[str] = []
        self.marked: list[str] = []
        self.text = ""
        self._inside = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert not any(name in ("src", "href") for name, _ in attrs)  # the page needs nothing else
        if tag == "mark":
            self._inside = True
            self.marked.append("")

    def handle_endtag(self, tag):
        self._inside = self._inside and tag != "mark"

    def handle_data(self, data):
        self.text += data
        if self._inside:
            self.marked[-1] += data


def test_the_terminal_shows_what_is_trained_on(recipe, capsys):
    assert main(["inspect", *recipe]) == 0
    shown = capsys.readouterr().out
    assert re.findall("⟦(.*?)⟧", shown, re.DOTALL) == [
        "one\ntwo \U0001f680<|im_end|>",
        "[bold]three[/] <b>four</b><|im_end|>",
        "five<|im_end|>",
    ]
    assert "rows.jsonl:1 · " in shown and re.search(r"rows.jsonl:5 · \d+ tokens · \d+ trained on \(\d+%\)", shown)
    assert "5: 3 trained on, 2 quarantined" in shown
    assert re.search(r"1 +the conversation is empty +rows.jsonl:2", shown)
    assert "\x1b" not in shown and "\u241b[2J" in shown


def test_colour_takes_the_place_of_brackets_on_a_terminal(recipe):
    found = examine(load_config(recipe[0], recipe[1:]), 5)
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", soft_wrap=True)
    print_inspection(found, console)
    shown = console.file.getvalue()
    assert "\x1b[1;32mone⏎" in shown and "⟦" not in shown and "Hi<|im_end|>" in shown


def test_quarantined_rows_are_shown_with_their_reasons(recipe, capsys):
    assert main(["inspect", *recipe, "--quarantined", "--rows", "1"]) == 0
    shown = capsys.readouterr().out
    assert "rows.jsonl:2 · the conversation is empty" in shown and '"messages": []' in shown
    assert "rows.jsonl:4 · " not in shown and "⟦" not in shown
    assert main(["inspect", *recipe, "--quarantined"]) == 0
    assert "rows.jsonl:4 · there is no assistant turn" in capsys.readouterr().out


def test_the_page_marks_what_is_trained_on_and_escapes_the_rows(recipe, tmp_path):
    assert main(["inspect", *recipe, "--html", "page/rows.html"]) == 0
    page = Page(tmp_path / "page" / "rows.html")
    assert page.marked[1:] == [  # the first mark is the legend's
        "one⏎\ntwo \U0001f680<|im_end|>",
        "[bold]three[/] <b>four</b><|im_end|>",
        "five<|im_end|>",
    ]
    assert not {"script", "b", "i", "img", "link"} & set(page.tags)
    assert "<script>alert(1)</script>\u241b[2J" in page.text and "<i>no answer</i>" in page.text
    assert "there is no assistant turn" in page.text and "rows.jsonl:2" in page.text


def test_the_pieces_are_the_documents_and_count_their_tokens(tiny_target):
    tokenizer = tiny_target.load_tokenizer()
    ids = np.array(tokenizer.encode("one \U0001f680 two"), np.int32)
    for cut in range(1, len(ids)):
        mask = np.arange(len(ids)) >= cut
        shown = show(tokenizer, Document(ids, mask, "x:1"))
        assert (shown.tokens, shown.trained) == (len(ids), len(ids) - cut)
        assert [piece.trained for piece in shown.pieces] == [False, True]
        assert shown.pieces[1].text.endswith("two") or cut == len(ids) - 1


def test_rows_are_spread_evenly_and_shown_whole():
    def document(row: int) -> Document:
        return Document(np.array([row, row], np.int32), np.array([False, True]), f"f:{row}")

    documents = Documents.gather([document(row) for row in range(10) for _ in range(2)])
    assert [d.origin for d in _spread(documents, 3)] == ["f:0", "f:0", "f:3", "f:3", "f:6", "f:6"]
    assert len(list(_spread(documents, 50))) == 20


def test_what_cannot_be_shown_is_said(recipe, capsys):
    assert main(["inspect", *recipe, "--rows", "0"]) == 2
    Path("rows.jsonl").write_text(json.dumps(ROWS[1]))
    assert main(["inspect", *recipe]) == 2
    assert "the conversation is empty (first: rows.jsonl:1)" in capsys.readouterr().err
