"""`python -m tests.families --write docs/targets.md`: the table of families, made anew."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

from .page import PAGE, write

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--write", type=Path, default=PAGE, metavar="PAGE", help="default: docs/targets.md")
warnings.filterwarnings("ignore")
write(parser.parse_args().write)
