"""What `check_target` says of a family, as a line of the table in docs/targets.md."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from data_pipelines.engines import Target
from data_pipelines.errors import first_line
from trainer.drafters import DRAFTERS
from trainer.fit import Fit, check_target

from .build import Family, save

HEADER = "| family | class | fits | packs | drafters | judged | why not, what else |\n|---|---|---|---|---|---|---|"


@dataclass(frozen=True)
class Verdict:
    """fits: None if the family cannot be built tiny here. says: why not. packed: whether documents share a row. tapped:
    whether taps are what they should be. drafters: those that can be trained. judged: whether speculative decoding works."""

    family: Family
    fits: bool | None
    says: str = ""
    packed: bool = False
    tapped: bool = False
    drafters: tuple[str, ...] = ()
    judged: bool = False

    @property
    def line(self) -> str:
        fits = {None: "?", True: "yes", False: "no"}[self.fits]
        cells = ["", "", ""]
        if self.fits:
            names = "all" if len(self.drafters) == len(DRAFTERS) else ", ".join(self.drafters)
            cells = ["together" if self.packed else "one by one", names, "yes" if self.judged else "no"]
        return " | ".join(("", self.family.model_type, self.family.model_class, fits, *cells, self.says, "")).strip()


def examine(family: Family, folder: Path) -> Verdict:
    """Build the family in `folder` and check it."""
    try:
        save(family, folder)
    except Exception as error:  # whatever a family's own code raises
        shutil.rmtree(folder, ignore_errors=True)
        return Verdict(family, None, f"cannot be built here: {type(error).__name__}: {_plain(first_line(error))}")
    return read(family, check_target(Target(str(folder), str(family))))


def read(family: Family, fit: Fit) -> Verdict:
    findings = {finding.name: finding for finding in fit.findings}
    drafters = tuple(name for name, why in fit.drafters.items() if why is None)
    if not fit.fits:
        refused = [
            findings[n] for n in ("model", "logits", "embedding", "rank") if n in findings and not findings[n].fits
        ]
        says = refused[0].says if refused else "; ".join(f"{name}: {why}" for name, why in fit.drafters.items())
        return Verdict(family, False, _plain(says))
    packed = "one by one" not in findings["packing"].says.split(";")[0]
    judged, tapped = findings["judge"].fits, findings["taps"].fits
    return Verdict(family, True, _plain(_notes(fit, findings)), packed, tapped, drafters, judged)


def _notes(fit: Fit, findings: dict) -> str:
    notes = [f"judge: {findings['judge'].says}"] if not findings["judge"].fits else []
    notes += [f"taps: {findings['taps'].says}"] if not findings["taps"].fits else []
    reasons: dict[str, list[str]] = {}
    for name, why in fit.drafters.items():
        if why is not None and "it reads taps" not in why:
            reasons.setdefault(why, []).append(name)
    return "; ".join([*notes, *(f"{', '.join(names)}: {why}" for why, names in reasons.items())])


def _plain(says: str) -> str:
    """Without figures that another machine may round in another way, and without what ends a cell of a table."""
    says = re.sub(r"off by \S+ of the largest from", "not", says)
    says = re.sub(r" by \d[\d.e+-]*%?", "", says)
    return " ".join(says.replace("|", "/").split())
