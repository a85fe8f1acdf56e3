"""`draftsmith plan <recipe> [key=value …]`: what a run will take, before it is started."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from data_pipelines.errors import UserError
from trainer.config import RunConfig, load_config

from .measure import SUPERVISED, measured_volume
from .plan import Plan, make_plan
from .show import print_plan
from .volume import Volume

_UNNAMED = "data that are not here"


def command(arguments: argparse.Namespace) -> None:
    plan = make_plan(*read_asked(arguments))
    if arguments.json:
        print(json.dumps(asdict(plan), indent=2))
    else:
        print_plan(plan)


def read_asked(arguments: argparse.Namespace) -> tuple[RunConfig, Volume]:
    """What a command line says, see `read_recipe`."""
    volume = ("samples", "tokens", "mean_tokens", "supervised")
    return read_recipe(arguments.recipe, arguments.overrides, **{key: getattr(arguments, key) for key in volume})


def plan_recipe(recipe: str, overrides: list[str], **volume: float | None) -> Plan:
    """volume: as for `read_recipe`, whose errors it raises."""
    return make_plan(*read_recipe(recipe, overrides, **volume))


def read_recipe(
    recipe: str,
    overrides: list[str],
    *,
    samples: float | None = None,
    tokens: float | None = None,
    mean_tokens: float | None = None,
    supervised: float | None = None,
) -> tuple[RunConfig, Volume]:
    """Raises UserError when neither the arguments nor data on this machine tell how much there is to train on."""
    for name, value in (("--samples", samples), ("--tokens", tokens), ("--mean-tokens", mean_tokens)):
        if value is not None and not value >= 1:
            raise UserError(f"{name} {value:g}; it must be at least 1")
    if supervised is not None and not 0 < supervised <= 1:
        raise UserError(f"--supervised {supervised:g} is not a share, more than 0 and at most 1")
    given = _given(samples, tokens, mean_tokens)
    config = _load(recipe, overrides, given is not None)
    if given is None:
        volume = measured_volume(config, samples)
        if supervised is not None:
            volume.supervised = supervised
    else:
        volume = Volume(*given, SUPERVISED.value if supervised is None else supervised)
    return config, volume


def _given(samples: float | None, tokens: float | None, mean: float | None) -> tuple[int, float] | None:
    """Documents and tokens of one, from any two of the three."""
    if samples and tokens and mean:
        raise UserError(
            "--samples, --tokens and --mean-tokens are all given", fix="give two of them: the third follows"
        )
    if samples and tokens:
        return round(samples), tokens / samples
    if mean and (samples or tokens):
        return round(samples or tokens / mean), mean
    return None


def _load(recipe: str, overrides: list[str], volume_is_given: bool) -> RunConfig:
    """A recipe whose data are the user's to name can be planned without them."""
    try:
        return load_config(recipe, overrides)
    except UserError as error:
        if not error.what.startswith("no value for data.path"):
            raise
        if not volume_is_given:
            raise UserError(
                f"{recipe} names no data, and nothing says how much there is",
                fix="--samples 600e3 --mean-tokens 1000, or data.path=<conversations>.jsonl",
            ) from error
        return load_config(recipe, [*overrides, f"data.path={_UNNAMED}"])
