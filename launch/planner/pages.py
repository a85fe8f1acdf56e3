"""The plans in the docs: one page for each recipe that says how it was planned.

    python -m launch.planner.pages docs/plans

A recipe says it in a comment, `# Planned with: draftsmith plan <recipe> --samples …`; the page holds what that prints.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import recipes

from .command import plan_recipe
from .show import markdown

_PLANNED = re.compile(r"^# Planned with: (draftsmith plan (\S+)((?: --[a-z-]+ \S+)*))$", re.MULTILINE)


def planned() -> Iterator[tuple[str, str, dict[str, float]]]:
    """(recipe, how it was planned, what that says of the volume) of each."""
    for path in sorted(Path(recipes.__path__[0]).glob("*.yaml")):
        if found := _PLANNED.search(path.read_text(encoding="utf-8")):
            words = shlex.split(found[3])
            yield found[2], found[1], {k[2:].replace("-", "_"): float(v) for k, v in zip(words[::2], words[1::2])}


def pages() -> Iterator[tuple[str, str]]:
    """(file name, Markdown) of each."""
    for recipe, command, volume in planned():
        yield f"{recipe}.md", markdown(plan_recipe(recipe, [], **volume), command)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages():
        (folder / name).write_text(text, encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
