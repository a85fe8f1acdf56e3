"""What judges in `make chaos`: the schedule and the audit. The run itself is `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.audit import audit_packs
from tests.chaos.faults import KINDS, plan


def test_a_seed_is_a_schedule_with_every_kind_in_it() -> None:
    assert plan(7, 40) == plan(7, 40) != plan(8, 40)
    assert {fault.kind for fault in plan(7, 40)} == set(KINDS)


STEPS = {  # the ranks' words → (packs lost, packs trained on twice)
    "two steps of two ranks": ("0 0 0,2 a; 1 0 1,3 a; 0 1 4,6 a; 1 1 5,7 a", (0, 0)),
    "a step done again after a crash": ("0 0 0,2 a; 1 0 1,3 a; 0 1 4,6 a; 0 1 4,6 b; 1 1 5,7 b", (0, 0)),
    "a rank that left out its packs": ("0 0 0,2 a; 1 0 1,3 a; 0 1 4,6 a", (2, 0)),
    "a pack on two ranks": ("0 0 0,2 a; 1 0 1,2 a; 0 1 4,6 a; 1 1 5,7 a", (1, 1)),
    "a step that nobody did": ("0 0 0,2 a; 1 0 1,3 a", (4, 0)),
}


@pytest.mark.parametrize("case", STEPS)
def test_the_audit_finds_lost_packs_and_those_that_were_used_twice(tmp_path: Path, case: str) -> None:
    words, expected = STEPS[case]
    log = tmp_path / "trainer.log"
    with log.open("w") as file:
        for line in words.split("; "):
            rank, step, packs, session = line.split()
            file.write(f"time=2026 level=info role=rank-{rank} msg=step step={step} packs={packs} session={session}\n")
    lost, twice, wrong = audit_packs(log, steps=2, batch=4)
    assert (lost, twice) == expected and bool(wrong) == (expected != (0, 0))
