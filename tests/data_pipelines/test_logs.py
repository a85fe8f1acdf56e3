"""Log lines that a program can take apart and a person can read."""

from __future__ import annotations

import logging
import re
import sys

import pytest

from data_pipelines.logs import Logfmt, fields, readable


def line(message: str, *arguments: object, **values: object) -> str:
    record = logging.LogRecord("x", logging.WARNING, "file", 1, message, arguments, sys.exc_info())
    record.__dict__.update(fields(**values))
    record.exc_info = record.exc_info if record.exc_info[0] else None
    return Logfmt("rank-0").format(record)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (12, "12"), (0.1 + 0.2, "0.3"), (None, "None"), ("", '""'), ("a b", '"a b"'), ("a=b", '"a=b"'),
        ('say "x"', '"say \\"x\\""'), ("two\nlines", '"two\\nlines"'), ("größer", "größer"), ([1, 2], '"[1, 2]"'),
    ],
)  # fmt: skip
def test_values_are_quoted_where_they_must_be(value: object, written: str) -> None:
    said = line("stored %d of %d", 1, 2, value=value)
    assert re.fullmatch(r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z level=warning role=rank-0 (.*)", said)
    assert said.endswith(f' msg="stored 1 of 2" value={written}')
    assert "\n" not in said


def test_a_traceback_follows_its_line_indented() -> None:
    try:
        raise ValueError("of the pack\nin two lines")
    except ValueError:
        said = line("failed", pack=3).splitlines()
    assert said[0].endswith("msg=failed pack=3")
    assert said[1] == "  Traceback (most recent call last):"
    assert said[-2:] == ["  ValueError: of the pack", "  in two lines"]


def test_people_read_it_without_the_keys() -> None:
    assert re.fullmatch(r"[\d:]{8} warning stored pack=12", readable(line("stored", pack=12)))
    assert readable(line('say "x" twice', who="a b")).endswith(' warning say "x" twice who="a b"')
    assert readable("RuntimeError: time=1") == "RuntimeError: time=1"
