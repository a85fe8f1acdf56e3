"""One test for every family."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from .build import Family
from .page import documented
from .proof import prove
from .verdict import examine

_documented = cache(documented)


def check_family(family: Family, folder: Path) -> None:
    """The family is exact, or refused in words, and the docs say which."""
    verdict = examine(family, folder)
    if verdict.fits:
        prove(folder, tapped=verdict.tapped)
    else:
        assert verdict.says and "Traceback" not in verdict.says
    if _documented() and verdict.fits is not None:
        line = _documented().get((family.model_type, family.model_class))
        assert verdict.line == line, "the table is out of date: python -m tests.families --write docs/targets.md"
