"""`draftsmith plan <recipe> [key=value …]`: what a run will take, before it is started."""

from __future__ import annotations

import argparse
import json
import math
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
    keys = ("samples", "tokens", "mean_tokens", "supervised", "config_dir")
    return read_recipe(arguments.recipe, arguments.overrides, **{key: getattr(arguments, key) for key in keys})


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
    config_dir: str | None = None,
) -> tuple[RunConfig, Volume]:
    """config_dir: see `load_config`.

    Raises UserError when neither the arguments nor data on this machine tell how much there is to train on.
    """
    for name, value in (("--samples", samples), ("--tokens", tokens), ("--mean-tokens", mean_tokens)):
        if value is not None and not 1 <= value < math.inf:
            raise UserError(f"{name} {value:g}; it must be a number of at least 1")
    if supervised is not None and not 0 < supervised <= 1:
        raise UserError(f"--supervised {supervised:g} is not a share, more than 0 and at most 1")
    given = _given(samples, tokens, mean_tokens)
    config = _load(recipe, overrides, config_dir, given is not None)
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
    if not (tokens or mean):
        return None  # --samples alone says how many rows the data have
    if not samples and not (tokens and mean):
        alone = "--tokens" if tokens else "--mean-tokens"
        raise UserError(f"{alone} alone does not say how many documents there are", fix="add --samples 600e3")
    samples, mean = samples or tokens / mean, mean or tokens / samples
    if samples < 1 or mean < 1:
        raise UserError(f"--tokens {tokens:g} makes {samples:g} documents of {mean:g} tokens", fix="raise --tokens")
    return round(samples), mean


def _load(recipe: str, overrides: list[str], config_dir: str | None, volume_is_given: bool) -> RunConfig:
    """A recipe whose data are the user's to name can be planned without them."""
    try:
        return load_config(recipe, overrides, config_dir)
    except UserError as error:
        if not error.what.startswith("no value for data.path"):
            raise
        if not volume_is_given:
            raise UserError(
                f"{recipe} names no data, and nothing says how much there is",
                fix="--samples 600e3 --mean-tokens 1000, or data.path=<conversations>.jsonl",
            ) from error
        return load_config(recipe, [*overrides, f"data.path={_UNNAMED}"], config_dir)
