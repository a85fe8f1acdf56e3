"""Errors for people: what was wrong, where, and what to do about it."""

from __future__ import annotations


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


class FeatureError(Exception):
    """Features that must not be trained on: truncated, corrupt, of another pack or target, not finite, all zero."""
