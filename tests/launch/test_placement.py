"""Who gets which GPU."""

from __future__ import annotations

import pytest

from data_pipelines.errors import UserError
from launch.placement import assign_gpus, visible_gpus


@pytest.mark.parametrize(
    ("gpus", "ranks", "producers", "expected"),
    [
        ("", 2, 2, ("", "")),
        ("01234567", 4, 4, ("0123", "4567")),
        ("0123", 2, 4, ("01", "2323")),
        ("012", 2, 1, ("01", "2")),
        ("01", 2, 2, ("01", "01")),  # nothing is left: the producers sit beside the ranks
        ("5", 1, 2, ("5", "55")),
    ],
)
def test_ranks_first_and_producers_on_what_is_left(gpus, ranks, producers, expected) -> None:
    assert assign_gpus(list(gpus), ranks, producers) == tuple(map(list, expected))


def test_fewer_gpus_than_ranks_are_refused() -> None:
    with pytest.raises(UserError, match=r"cluster\.ranks=2, and this machine shows 1 GPU"):
        assign_gpus(["0"], 2, 2)


def test_the_user_may_hide_gpus(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert visible_gpus() == ["3", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
