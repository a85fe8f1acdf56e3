"""The prefetcher: order, depth, errors, the time that the loop waits."""

from __future__ import annotations

import errno
import threading
import time

import numpy as np
import pytest
import torch

from data_pipelines.features import Features
from data_pipelines.packing import Document, Pack
from data_pipelines.stream.consumer import GaveUp, Prefetcher


class Steps:
    """A source that the test lets go step by step; it notes what was wanted and got."""

    def __init__(self, *, fail_at: int | None = None, seconds: float = 0.0):
        self.wanted: list[int] = []
        self.got: list[int] = []
        self._fail_at, self._seconds = fail_at, seconds
        self._interrupted = threading.Event()

    def want(self, items):
        self.wanted += [index for index, _ in items]

    def get(self, index, pack):
        if index == self._fail_at:
            raise ValueError(f"pack {index} is broken")
        if self._interrupted.wait(self._seconds):
            raise RuntimeError("interrupted")
        self.got.append(index)
        return Features(torch.full((1, 1, 1), float(index)), torch.zeros(1, 1))

    def interrupt(self):
        self._interrupted.set()

    def close(self):
        pass


PACK = Pack((Document(np.ones(1, dtype=np.int32), np.ones(1, dtype=bool)),))


def items(count: int):
    return [(index, PACK) for index in range(count)]


@pytest.mark.parametrize("depth", [1, 2, 5, 50])
def test_everything_arrives_once_and_in_order(depth):
    prefetcher = Prefetcher(Steps(), items(20), depth)
    assert [(index, features.taps.item()) for index, _, features in prefetcher] == [(i, i) for i in range(20)]
    with pytest.raises(StopIteration):
        next(prefetcher)
    prefetcher.close()


def test_never_more_than_depth_packs_are_under_way():
    source = Steps()
    prefetcher = Prefetcher(source, items(20), 3)
    for taken in range(20):
        time.sleep(0.01)
        assert len(source.wanted) <= taken + 3
        next(prefetcher)
    prefetcher.close()


def test_an_error_comes_after_what_was_fetched_before_it_and_never_a_repeated_pack():
    prefetcher = Prefetcher(Steps(fail_at=2), items(5), 4)
    assert [next(prefetcher)[0], next(prefetcher)[0]] == [0, 1]
    for _ in range(2):
        with pytest.raises(ValueError, match="pack 2 is broken"):
            next(prefetcher)
    prefetcher.close()


def test_an_error_in_the_items_is_the_loops_too():
    def broken():
        yield 0, PACK
        raise OSError("the plan cannot be read")

    prefetcher = Prefetcher(Steps(), broken(), 1)
    assert next(prefetcher)[0] == 0
    with pytest.raises(OSError, match="plan"):
        next(prefetcher)
    prefetcher.close()


def test_a_loop_that_gives_up_is_not_kept_and_loses_nothing():
    begin = threading.Event()

    class Late(Steps):
        def get(self, index, pack):
            begin.wait()
            return super().get(index, pack)

    prefetcher = Prefetcher(Late(), items(3), 2)
    with pytest.raises(GaveUp):
        prefetcher.next(lambda: True)
    begin.set()
    assert [index for index, _, _ in prefetcher] == [0, 1, 2]
    prefetcher.close()


def test_a_disk_that_times_out_is_an_error_not_a_loop_that_gives_up():
    class Slow(Steps):
        def get(self, index, pack):
            raise OSError(errno.ETIMEDOUT, "the shared folder does not answer")  # Python's own TimeoutError

    prefetcher = Prefetcher(Slow(), items(3), 2)
    with pytest.raises(TimeoutError, match="shared folder"):
        prefetcher.next(lambda: True)
    prefetcher.close()
    assert not issubclass(TimeoutError, GaveUp) and not issubclass(GaveUp, OSError)


def test_giving_up_matters_only_while_there_is_nothing():
    prefetcher = Prefetcher(Steps(), items(2), 2)
    time.sleep(0.2)
    assert prefetcher.next(lambda: True)[0] == 0
    prefetcher.close()


def test_waiting_is_measured():
    prefetcher = Prefetcher(Steps(seconds=0.1), items(5), 2)
    assert len(list(prefetcher)) == 5
    assert 0.4 < prefetcher.wait_seconds < 2
    prefetcher.close()


def test_a_loop_that_is_slower_than_the_source_does_not_wait():
    prefetcher = Prefetcher(Steps(), items(5), 2)
    time.sleep(0.2)
    for _ in prefetcher:
        time.sleep(0.05)
    assert prefetcher.wait_seconds < 0.1
    prefetcher.close()


@pytest.mark.parametrize("seconds", [0.0, 600.0])
def test_close_ends_the_thread_whatever_it_does(seconds):
    prefetcher = Prefetcher(Steps(seconds=seconds), items(50), 2)
    time.sleep(0.05)
    before = time.monotonic()
    prefetcher.close()
    prefetcher.close()
    assert time.monotonic() - before < 5
    assert not any(thread.name == "prefetch" for thread in threading.enumerate())
    with pytest.raises(RuntimeError, match="closed"):
        next(prefetcher)
