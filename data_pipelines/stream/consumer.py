"""Prefetching: a background thread wants, gets and verifies the next packs while the loop trains on the present one."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from ..features import Features
from ..packing import Pack
from .sources import Source

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 60.0
_WATCH_SECONDS = 1.0


class GaveUp(Exception):
    """No pack has come, and the caller does not want to wait any longer."""


class Prefetcher:
    """Iterate it for (index, pack, features), in the order of `items`; features are None for a pack in quarantine.

    depth: packs that are wanted or fetched but not yet handed to the loop, at most. An error in the background is
    raised by `next`, after the packs that were fetched before it, and by every `next` thereafter. `wait_seconds` is the
    time that `next` has been blocked in all: what the loop waits for data.

    Memory of a rank, with P = T·(A + 1)·H·(bytes of the spec's dtype) + 8·T + 640 bytes, the payload of its longest pack
    (`features.payload_bytes`): at most depth·P for what is fetched, P for the one that is being fetched and verified (its
    tensors lie in the store's bytes), and the store's landing buffer, the next power of two. A source that reads files copies
    once: 2·P. To that the loop adds the packs of the step that it works on, and the store store.buffer_bytes.
    """

    def __init__(self, source: Source, items: Iterable[tuple[int, Pack]], depth: int):
        if depth < 1:
            raise ValueError(f"depth is {depth}; it must be at least 1")
        self.wait_seconds = 0.0
        self._source, self._items, self._depth = source, iter(items), depth
        self._fetched: deque[tuple[int, Pack, Features | None]] = deque()
        self._wanted: deque[tuple[int, Pack]] = deque()
        self._error: BaseException | None = None
        self._ended = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[int, Pack, Features | None]]:
        return self

    def __next__(self) -> tuple[int, Pack, Features | None]:
        return self.next()

    def next(self, give_up: Callable[[], bool] = lambda: False) -> tuple[int, Pack, Features | None]:
        """The same, but raises GaveUp soon after `give_up()` has become true while there is nothing to hand out."""
        began = time.monotonic()
        with self._changed:
            while not (self._fetched or self._ended or self._closed):
                self._changed.wait(_WATCH_SECONDS)  # a bound, should the thread die without a word
                if self._fetched:
                    break
                if give_up():
                    raise GaveUp
                if not self._thread.is_alive():
                    break
            self.wait_seconds += time.monotonic() - began
            if self._closed:
                raise RuntimeError("the prefetcher is closed")
            if self._fetched:
                item = self._fetched.popleft()
                self._changed.notify_all()
                return item
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopIteration
            raise RuntimeError("the prefetching thread has died")

    def close(self) -> None:
        """End the thread; the source is interrupted, but stays its owner's to close. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._source.interrupt()
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            log.error("the prefetching thread has not ended within %.0f s", _CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            while self._make_room() and self._fetch_next():
                pass
        except BaseException as error:  # whatever it is, it is the loop's
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _make_room(self) -> bool:
        """Wait until something more may be wanted or fetched, and want it. False when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._wanted or len(self._fetched) < self._depth)
            if self._closed:
                return False
            room = self._depth - len(self._fetched) - len(self._wanted)
        new = []
        for _, item in zip(range(room), self._items):
            new.append(item)
        if new:
            self._source.want(new)
            self._wanted.extend(new)
        return True

    def _fetch_next(self) -> bool:
        """Get the oldest wanted pack. False when there is nothing left."""
        if not self._wanted:
            return False
        index, pack = self._wanted[0]
        features = self._source.get(index, pack)
        with self._changed:
            self._wanted.popleft()
            self._fetched.append((index, pack, features))
            self._changed.notify_all()
        return True
