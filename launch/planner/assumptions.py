"""What a plan assumes is a number with a name and a source, so that it can be printed, doubted and replaced."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Assumption:
    """name: what it is of, for people. source: where the number comes from."""

    name: str
    value: float
    source: str
