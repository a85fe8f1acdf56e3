"""Errors for people: what was wrong, where, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something that the person who started the program can put right.

    The command line prints `what`, `where` and `fix` on a few lines, without a traceback, and exits with status 2.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None):
        super().__init__(what)
        self.what, self.where, self.fix = what, where, fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)


def first_line(error: BaseException) -> str:
    """The first line of what somebody else's code said went wrong, or at least its kind."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def did_you_mean(name: str, options: Iterable[str]) -> str | None:
    found = difflib.get_close_matches(name, list(options), n=1, cutoff=0.5)
    return f"did you mean {found[0]}?" if found else None


def check_choice(key: str, value: str, options: Iterable[str]) -> None:
    """Raises UserError, with the nearest right name, unless `value` is one of `options`."""
    options = tuple(options)
    if value not in options:
        raise UserError(f"{key}={value} is not one of {', '.join(options)}", fix=did_you_mean(value, options))


class FeatureError(Exception):
    """Features that must not be trained on: truncated, corrupt, of another pack or target, not finite, all zero."""
