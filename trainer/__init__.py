"""Everything that learns: drafters, losses, the loop, checkpoints, decoding, export."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

STARTED_BY = os.getppid()  # read before anything heavy is imported: those seconds are enough for it to die


def _refuse_shadows() -> None:
    """`python -m` looks into the working directory first: a person's own conf.py would be taken for ours."""
    root = Path(__file__).resolve().parents[1]
    for name in ("conf", "data_pipelines", "launch", "recipes"):
        found = find_spec(name)
        origin = Path(found.origin).resolve() if found and found.origin else None
        if origin and origin.parent != root / name:
            says = (
                f"{origin} is taken for Draftsmith's own `{name}`; set PYTHONSAFEPATH=1, or start from another folder"
            )
            raise SystemExit(f"error: {says}") if sys.argv[0] == "-m" else ImportError(says)


_refuse_shadows()
