"""The table of families in docs/targets.md."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import transformers

from .build import all_families
from .verdict import HEADER, Verdict, examine

PAGE = Path(__file__).parents[2] / "docs/targets.md"
_BEGIN, _END = "<!-- families: begin -->", "<!-- families: end -->"


def documented(page: Path = PAGE) -> dict[tuple[str, str], str]:
    """(model type, class) → line of the table. Empty if it was written with another version of transformers."""
    table = _table(page)
    if f"transformers {transformers.__version__}" not in table:
        return {}
    lines = [line for line in table.splitlines() if re.match(r"\| [\w.-]+ \| \w+ \|", line)]
    return {
        tuple(cell.strip() for cell in line.split("|")[1:3]): line for line in lines if not line.startswith("| family")
    }


def _table(page: Path) -> str:
    return page.read_text().split(_BEGIN)[1].split(_END)[0]


def render(verdicts: list[Verdict]) -> str:
    counts = [sum(v.fits is fits for v in verdicts) for fits in (True, False, None)]
    summary = (
        f"With transformers {transformers.__version__}, a tiny random model of each of {len(verdicts)} families was tried: "
        f"{counts[0]} fit, {counts[1]} are refused, {counts[2]} could not be built.\n\n"
        "* **fits**: no logit of a producer and a rank is off by more than 1e-4 from the model's own; `?`: not built.\n"
        "* **packs**: documents of a pack are computed together in one row, or one by one.\n"
        "* **drafters**: those whose default shape can be trained for it.\n"
        "* **judged**: speculative decoding with it works, so that a run can report acceptance.\n\n"
        "A checkpoint of another shape may differ; `draftsmith check-target` says. The table is written by\n"
        "`python -m tests.families`."
    )
    ordered = sorted(verdicts, key=lambda v: (v.family.model_type, v.family.model_class))
    return "\n".join([summary, "", HEADER, *(v.line for v in ordered)])


def write(page: Path) -> None:
    """Try every family, and put the table into a page."""
    verdicts = []
    with tempfile.TemporaryDirectory() as folder:
        for family in all_families():
            verdicts.append(examine(family, Path(folder) / str(family)))
            print(verdicts[-1].line, flush=True)
    old = page.read_text()
    page.write_text(old.replace(_BEGIN + _table(page) + _END, f"{_BEGIN}\n{render(verdicts)}\n{_END}"))
