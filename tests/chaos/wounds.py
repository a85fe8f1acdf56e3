"""The means: what is done to a process, its connections, its memory, to the store and to checkpoints."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil

from trainer.checkpoint import whole_checkpoints

from ..data_pipelines.stream.cable import Cable
from .victim import ROOT, Victim

_PIDFD_GETFD = 438  # the same number on all architectures
_PAYLOAD_MARK = b'{"__metadata__"'  # how every payload of features begins, after eight bytes
_LEAST_SEGMENT_BYTES = 32 * 1024**2


class NotNow(Exception):
    """What was to be wounded is not there at the moment."""


def freeze(process: psutil.Process, seconds: float) -> None:
    """SIGSTOP; SIGCONT after so many seconds, or never for 0."""
    process.suspend()
    if seconds:
        after(seconds, lambda: process.resume())


def after(seconds: float, action) -> None:
    """Do something later, if what it is done to is still there."""

    def run() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            action()

    timer = threading.Timer(seconds, run)
    timer.daemon = True
    timer.start()


def cut_connections(process: psutil.Process) -> int:
    """Shut down every TCP connection that a process has, from outside; it finds them broken. Returns how many."""
    libc = ctypes.CDLL(None, use_errno=True)
    count = 0
    with contextlib.closing(_Descriptor(os.pidfd_open(process.pid))) as handle:
        for connection in process.net_connections("tcp"):
            if connection.status != psutil.CONN_ESTABLISHED:
                continue
            copy = libc.syscall(_PIDFD_GETFD, handle.number, connection.fd, 0)
            if copy < 0:
                if ctypes.get_errno() == 1:
                    raise PermissionError("connections of another process cannot be reached here")
                continue  # closed meanwhile
            with socket.socket(fileno=copy) as duplicate, contextlib.suppress(OSError):
                duplicate.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


class _Descriptor:
    def __init__(self, number: int):
        self.number = number

    def close(self) -> None:
        os.close(self.number)


def flip_bits(process: psutil.Process, rng: random.Random) -> int:
    """Flip one bit in each payload that lies in the memory that a producer lends to the store. Returns how many."""
    count = 0
    with (
        open(f"/proc/{process.pid}/maps") as maps,
        open(f"/proc/{process.pid}/mem", "r+b", buffering=0) as memory,
    ):
        for line in maps:
            span, rights = line.split()[:2]
            start, end = (int(edge, 16) for edge in span.split("-"))
            if rights.startswith("rw") and end - start >= _LEAST_SEGMENT_BYTES:
                with contextlib.suppress(OSError):  # unmapped meanwhile
                    count += _flip_in(memory, start, end, rng)
    return count


def _flip_in(memory, start: int, end: int, rng: random.Random, piece: int = 4 * 1024**2) -> int:
    count = 0
    for base in range(start, end, piece):
        memory.seek(base)
        found = memory.read(min(piece, end - base))
        at = found.find(_PAYLOAD_MARK)
        while at >= 0:
            place = at + rng.randrange(700, 4000)  # behind the header
            if place < len(found):
                memory.seek(base + place)
                memory.write(bytes([found[place] ^ (1 << rng.randrange(8))]))
                count += 1
            at = found.find(_PAYLOAD_MARK, at + 1)
    return count


def remove_objects(victim: Victim, count: int) -> int:
    """Remove objects that somebody will want to read. Returns how many were there."""
    objects = f"http://127.0.0.1:{victim.metrics_port()}/get_all_keys"
    command = [sys.executable, "-m", "tests.chaos.vandal", victim.config().store.master, objects, str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise NotNow(f"the vandal could not do it: {done.stderr[-200:]}")
    return int(done.stdout.split()[-1])


def spoil_checkpoint(victim: Victim, rng: random.Random) -> str:
    """Turn a bit in, cut or remove a file of the newest checkpoint. Says which."""
    newest = whole_checkpoints(victim.run_dir / "checkpoints")[-1]
    file = rng.choice(sorted(newest.iterdir()))
    how = rng.choice(["flip", "cut", "remove"])
    if how == "remove":
        file.unlink()
    elif how == "cut":
        os.truncate(file, rng.randrange(file.stat().st_size))
    else:
        content = bytearray(file.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
    return f"{how} {newest.name}/{file.name}"


class Guests:
    """Producers that nobody has invited: rogues, honest ones that join and leave, one behind a cable that is cut."""

    def __init__(self, victim: Victim):
        self._victim, self._cables, self._guests = victim, [], []

    def rogue(self, crime: str, times: int) -> None:
        self._start("tests.data_pipelines.stream.rogue", "--crime", crime, "--times", str(times))

    def honest(self, seconds: float) -> None:
        """Joins, works, and is killed."""
        guest = self._start("data_pipelines.stream.producer", "--name", f"guest-{len(self._guests)}")
        after(seconds, guest.kill)

    def behind_cable(self, seconds: float, *, reset: bool) -> None:
        """Works for a while, is cut off from the ledger for as long, works again, and is killed."""
        cable = Cable(self._victim.config().source.ledger)
        self._cables.append(cable)
        guest = self._start("data_pipelines.stream.producer", "--name", f"guest-{len(self._guests)}", url=cable.url)
        for number, action in enumerate((lambda: cable.cut(reset=reset), cable.heal, guest.kill), 1):
            after(seconds * number, action)

    def _start(self, module: str, *options: str, url: str = "") -> subprocess.Popen:
        source = self._victim.config().source
        command = [sys.executable, "-m", module, "--ledger", url or source.ledger, "--token-file", source.token_file]
        with (self._victim.folder / f"guest-{len(self._guests)}.log").open("w") as log:
            process = subprocess.Popen([*command, *options], stdout=log, stderr=log, cwd=ROOT)
        self._guests.append(process)
        return process

    def close(self) -> None:
        for guest in self._guests:
            guest.kill()
            guest.wait()
        for cable in self._cables:
            cable.close()


def shared_memory() -> set[str]:
    """Segments in /dev/shm that no living process has mapped: what somebody who is gone has left.

    Without semaphores: a run makes none, and other programs of the machine may be leaving theirs just now.
    """
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped |= {line.split()[5] for line in maps.read_text().splitlines() if " /dev/shm/" in line}
    found = [path for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")]
    return {path.name for path in found if str(path) not in mapped}
