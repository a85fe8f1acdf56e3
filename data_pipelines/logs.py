"""The log of every process: one logfmt line an event, to stderr.

    time=2026-11-29T18:49:33.123Z level=info role=producer-0 msg=stored pack=12 bytes=1234

Values are quoted where they must be (as JSON strings); a traceback follows its line, indented: one
that is not ended the process.
"""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime
from textwrap import indent
from typing import Any

_NEEDS_QUOTES = re.compile(r'[\s"=]|^$')
_LINE = re.compile(r'time=\S+T([\d:]+)\S* level=(\w+) role=(?:"[^"]*"|\S+) msg=("(?:[^"\\]|\\.)*"|\S*)(.*)')


def fields(**values: Any) -> dict[str, Any]:
    """Fields of one event: `log.info("stored", extra=fields(pack=12, bytes=1234))`."""
    return {"fields": values}


def configure_logging(role: str) -> None:
    """Called once, by the entry point of a process. role: the process as people know it, such as `rank-0`."""
    handler = logging.StreamHandler()
    handler.setFormatter(Logfmt(role))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every poll


class Logfmt(logging.Formatter):
    def __init__(self, role: str):
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        values = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "role": self._role,
            "msg": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        lines = [" ".join(f"{name}={_quoted(value)}" for name, value in values.items())]
        if record.exc_info:
            lines.append(indent(self.formatException(record.exc_info), "  "))
        return "\n".join(lines)


def readable(line: str) -> str:
    """A line of a log as a person would write it: `18:49:33 info stored pack=12`; any other line as it is."""
    match = _LINE.fullmatch(line)
    if match is None:
        return line
    clock, level, message, rest = match.groups()
    message = json.loads(message) if message.startswith('"') else message
    return f"{clock} {level} {message}{rest}"


def _quoted(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return json.dumps(text, ensure_ascii=False) if _NEEDS_QUOTES.search(text) else text
