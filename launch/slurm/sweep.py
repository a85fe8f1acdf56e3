"""`optim.lr=1e-4,3e-4`: one run for each combination of the values, in Hydra's own syntax."""

from __future__ import annotations

from itertools import product

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from data_pipelines.errors import UserError


def combinations(overrides: list[str]) -> list[tuple[str, list[str]]]:
    """(name, overrides) of each run; a single one without a name when nothing is swept.

    The name says what is special about the run, such as `optim.lr=1e-4,seed=1`; it can be a folder's.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise UserError(f"not an override: {str(error).splitlines()[0]}", fix="write key=value or key=a,b") from error
    fixed = [text for text, override in zip(overrides, parsed) if not override.is_sweep_override()]
    swept = [
        [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        for override in parsed
        if override.is_sweep_override()
    ]
    if any(values[0].startswith("run_dir=") for values in swept):
        raise UserError("run_dir cannot be swept", fix="give one: each run has a folder of its own in it")
    return [(",".join(chosen).replace("/", "_"), [*fixed, *chosen]) for chosen in product(*swept)]
