"""What torchrun's and a child's own words say of how it ended. The texts are torchrun's own, shortened."""

from __future__ import annotations

import pytest

from launch.supervision.failures import describe, ending, failure, told_to_stop

TRACEBACK = """[rank0]: Traceback (most recent call last):
[rank0]:   File "x.py", line 9, in <module>
[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:52379
"""
LOGGED = """time=2026-11-29T18:49:33.123Z level=error role=rank-0 msg="pack 3 failed"
  Traceback (most recent call last):
    File "y.py", line 1, in f
  KeyError: 'only logged'
time=2026-11-29T18:49:33.124Z level=info role=rank-0 msg=step step=4
"""


def summary(*ranks: tuple[int, int]) -> str:
    """torchrun's account of failed ranks, the one that failed first at the end."""
    blocks = [
        f"[{i}]:\n  time      : 2026-11-29_19:07:01\n  host      : localhost\n  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {code} (pid: 12419)\n  error_file: <N/A>\n"
        for i, (rank, code) in enumerate(ranks)
    ]
    return "x.py FAILED\n-----\nFailures:\n" + "-----\nRoot Cause (first observed failure):\n".join(blocks)


@pytest.mark.parametrize(
    ("status", "said", "what", "final", "words"),
    [
        (-9, "", "was ended by SIGKILL", False, ""),
        (-9, "error: the disk is full\n  fix: more\n", "was ended by SIGKILL", True, ""),
        (1, TRACEBACK + summary((0, -15), (1, -9)), "(rank 1) was ended by SIGKILL", False, ""),
        (1, TRACEBACK + summary((1, -11), (0, 1)), "(rank 1) was ended by SIGSEGV", False, ""),
        (1, "error: x\n" + summary((0, 1), (1, 2)), "exited with status 1", True, ""),
        (2, "", "exited with status 2", True, ""),
        (1, LOGGED + TRACEBACK + summary((1, -15), (0, 1)), "exited with status 1", False,
         "RuntimeError: Connection closed by peer [127.0.0.1]:52379"),
    ],
)  # fmt: skip
def test_how_a_trainer_ended(status: int, said: str, what: str, final: bool, words: str) -> None:
    found = ending("trainer", status, said)
    assert (found.what, found.final, found.words) == (f"trainer {what}", final, words)


def test_a_preemption_is_told_from_other_endings() -> None:
    assert told_to_stop(summary((1, 75), (0, 75)), 75)
    assert told_to_stop("W1129 torchrun got signal: 15", 75) and told_to_stop("W1129 torchrun got signal: 10", 75)
    assert not told_to_stop(summary((0, -15), (1, -9)), 75)


def test_a_signal_has_its_name_on_this_machine_and_behind_srun() -> None:
    assert describe(-9) == describe(137) == "was ended by SIGKILL"
    assert describe(1) == "exited with status 1" and describe(255) == "exited with status 255"


def test_people_read_the_end_of_the_log_without_its_keys() -> None:
    error = failure("producer-0", "logs/producer-0.log", LOGGED.splitlines()[0], "producer-0 exited with status 1")
    assert error.what.splitlines() == ["producer-0 exited with status 1", "  | 18:49:33 error pack 3 failed"]


def test_an_exception_that_was_only_logged_is_not_the_cause() -> None:
    error = failure("trainer", "logs/trainer.log", LOGGED + TRACEBACK, "the trainer exited with status 1")
    assert "RuntimeError" in error.what and "KeyError" not in error.what
