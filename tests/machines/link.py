"""The process between the two TUN devices of a `Link`: packets are paced, delayed, counted, and lost when it is cut.

The kernel's own netem would do it too, and is missing from many kernels. Settings come as lines of JSON on standard input,
{"rate": bytes a second, "delay": seconds, "cut": bool}, each answered by the counts. It ends with its input.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_LARGEST = 1 << 16
_QUEUE_SECONDS = 0.1  # a packet that would have to wait for longer before it is sent is dropped, as by a full switch
_AT_ONCE = 64


def open_tun(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


class Direction:
    """What goes from one end to the other. A packet leaves when those before it have been sent, and takes `delay`."""

    def __init__(self, source: int, sink: int):
        self.source, self.sink = source, sink
        self.bytes = self.dropped = 0
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._free_at = 0.0

    def take(self, rate: float, delay: float, cut: bool) -> None:
        if cut:
            self._under_way.clear()
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(self.source, _LARGEST)
            except BlockingIOError:
                return
            now = time.monotonic()
            starts = max(now, self._free_at)
            if cut or starts - now > _QUEUE_SECONDS:
                self.dropped += 1
                continue
            self._free_at = starts + (len(packet) / rate if rate else 0.0)
            self._under_way.append((self._free_at + delay, packet))

    def give(self) -> float | None:
        """Hand over what has arrived. Returns the seconds until the next packet does, None without one."""
        while self._under_way:
            left = self._under_way[0][0] - time.monotonic()
            if left > 0:
                return left
            _, packet = self._under_way.popleft()
            with contextlib.suppress(OSError):  # the device is not up: nobody is there to take it
                os.write(self.sink, packet)
                self.bytes += len(packet)
        return None


def main() -> None:
    first, second = (open_tun(name) for name in sys.argv[1:])
    directions = [Direction(first, second), Direction(second, first)]
    settings = {"rate": 0.0, "delay": 0.0, "cut": False}
    while True:
        waits = [wait for direction in directions if (wait := direction.give()) is not None]
        ready, _, _ = select.select([first, second, sys.stdin], [], [], min(waits, default=None))
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                return
            settings.update(json.loads(line))
            counts = {"bytes": [d.bytes for d in directions], "dropped": [d.dropped for d in directions]}
            print(json.dumps(counts), flush=True)
        for direction in directions:
            if settings["cut"] or direction.source in ready:
                with contextlib.suppress(OSError):  # its machine is gone
                    direction.take(**settings)


if __name__ == "__main__":
    main()
