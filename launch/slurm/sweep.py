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
    fixed, swept = [], []
    for text in overrides:
        values = _values(text)
        if values is None:
            fixed.append(text)
        elif values:
            swept.append(values)
        else:
            raise UserError(f"{text} has no values", fix="write key=a,b or key=range(1,4)")
    if any(values[0].startswith("run_dir=") for values in swept):
        raise UserError("run_dir cannot be swept", fix="give one: each run has a folder of its own in it")
    return [(",".join(chosen).replace("/", "_"), [*fixed, *chosen]) for chosen in product(*swept)]


def _values(text: str) -> list[str] | None:
    """The overrides that a sweep stands for; None for one that is not a sweep."""
    try:
        override = OverridesParser.create().parse_override(text)
        if not override.is_sweep_override():
            return None
        return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    except (HydraException, ValueError) as error:  # ValueError: range(1,9,0)
        raise UserError(f"not an override: {str(error).splitlines()[0]}", fix="write key=value or key=a,b") from error
