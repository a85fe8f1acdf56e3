"""Where a drafter begins: fresh, or as one that there is already (`drafter.init`)."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from typing import Any

from data_pipelines.engines import Target
from data_pipelines.errors import UserError

from .drafters import DrafterConfig
from .export.saved import SavedDrafter, find_drafter, read_drafter
from .target import FrozenTarget

log = logging.getLogger("trainer")


def begin_from(given: DrafterConfig, target: Target) -> tuple[DrafterConfig, SavedDrafter | None, str]:
    """The config of a run's drafter with all that says what it is taken over from `init`, the drafter there, and, in words,
    which keys follow it. What says how it is trained stays the run's.

    Raises UserError when a key was given and contradicts the drafter there.
    """
    if not given.init:
        return given, None, ""
    saved = read_drafter(find_drafter(given.init), target)
    theirs = saved.config
    if theirs.name != given.name:
        raise UserError(
            f"drafter={given.name}, but what drafter.init={given.init} holds is {theirs.name}",
            fix=f"use drafter={theirs.name}, or another init",
        )
    own = saved.head is not None and saved.has_own_head(FrozenTarget.load(target, saved.head.dtype))
    if hasattr(theirs, "train_head"):
        theirs = replace(theirs, train_head=own or given.train_head)  # a head like the target's may be trained or not
    taken = {f.name: getattr(theirs, f.name) for f in fields(given) if f.name not in _trained(given, theirs)}
    _refuse_contradictions(given, taken)
    changed = {key: value for key, value in taken.items() if value != getattr(given, key) and key != "layer"}
    follow = ", ".join(f"{key}={value}" for key, value in changed.items())
    said = f"begins from {saved.path}{', whose are ' if follow else ''}{follow}"
    log.info("the drafter %s", said)
    return replace(given, **taken), saved, said


def _trained(given: DrafterConfig, theirs: DrafterConfig) -> set[str]:
    """The keys that stay the run's."""
    keys = {*given.training, "name", "init"}
    if getattr(theirs, "form", "") == "chained":  # a module for each step: how many is what it is
        keys.discard("steps")
    if getattr(theirs, "confidence_weight", 0.0) and getattr(given, "confidence_weight", 0.0):
        keys.add("confidence_weight")  # the head is there; what its loss weighs is the run's
    return keys


def _refuse_contradictions(given: DrafterConfig, taken: dict[str, Any]) -> None:
    """A value that is the default counts as not given."""
    fresh, contradicting = type(given)(), []
    for key, there in taken.items():
        asked = getattr(given, key)
        if asked not in (there, getattr(fresh, key)):
            contradicting.append(key)
    if contradicting:
        said = "\n    ".join(
            f"drafter.{key}={getattr(given, key)}, and {key}={taken[key]} there" for key in contradicting
        )
        right = " ".join(f"drafter.{key}={taken[key]}" for key in contradicting)
        raise UserError(
            f"what was given contradicts the drafter of drafter.init={given.init}:\n    {said}",
            fix=f"give {right} (or leave it out where a recipe does not set it), or begin from another drafter",
        )
