"""What the end of a run says of a training that did nothing, or next to nothing."""

from __future__ import annotations

from rich.console import Console

from launch.stages.report import draw_curves, table, warnings
from launch.supervision.screen import describe_step


def summary(before: float | None, after: float | None, *, share: float | None = 1.0, loss: float | None = 2.0) -> dict:
    judged = [{"all": {"acceptance_length": length, "rounds": 1, "tokens": 1, "prefix_rate": [], "conditional_rate": []}}
              if length else {} for length in (before, after)]  # fmt: skip
    return {
        "recipe": "r", "target": "t", "drafter": "eagle3", "world_size": 1, "producers": 0, "steps": 3, "packs": 12,
        "tokens": 100, "seconds": 10.0, "tokens_per_second": 10.0, "wait_fraction": 0.0, "weights_sha256": "0" * 64,
        "loss": {"first": loss, "last": loss}, "trained_share": share, "lossless": True, "export": "export",
        "not_judged": None, "acceptance": dict(zip(("before", "after"), judged)),
    }  # fmt: skip


def test_an_acceptance_that_did_not_move_is_said():
    assert warnings(summary(1.0, 1.5)) == warnings(summary(None, None)) == []
    (said,) = warnings(summary(1.50, 1.505))
    assert "acceptance did not move: 1.50 before, 1.50 after" in said


def test_drafts_that_were_not_trained_are_said():
    assert "no draft was trained" in warnings(summary(1.0, 1.5, share=0.0))[0]
    assert "only 12% of the drafts" in warnings(summary(1.0, 1.5, share=0.12))[0]
    assert len(warnings(summary(1.0, 1.0, share=None))) == 2


def test_the_table_has_no_number_where_nothing_was_trained():
    console = Console(width=120, record=True, quiet=True)
    with console.capture() as captured:
        console.quiet = False
        console.print(table(summary(1.0, 1.0, share=None, loss=None)))
        console.print(table(summary(1.0, 1.5, share=0.9)))
    assert "none: nothing was trained" in captured.get()
    assert "2.000 → 2.000, of 90.0% of the drafts that count" in captured.get()


def test_a_step_that_trained_nothing_is_shown_as_such():
    row = {"step": 0, "loss": None, "expected_length": 1.0, "tokens": 10, "seconds": 1.0, "wait_seconds": 0.0}
    assert describe_step(row).startswith("nothing trained")
    assert describe_step({**row, "loss": 1.25}).startswith("loss 1.250")
    assert len(draw_curves([{**row, "step": step} for step in range(3)])) == 2  # no curve of the loss
    assert len(draw_curves([{**row, "step": step, "loss": step or None} for step in range(3)])) == 3
