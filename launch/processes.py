"""The processes of a run on one machine: started, watched, restarted, stopped, and never left behind.

Every child leads a session of its own, so that a Ctrl-C in the terminal reaches the launcher alone, which then stops
the children in the right order. On Linux the kernel also kills each child when the launcher dies without a word (SIGKILL, out
of memory): nobody is left then to wait for, and what is on disk is whole at any moment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from data_pipelines.errors import UserError

USER_ERROR = 2  # exit status of a child that printed `error: …`; starting it again would end the same way
_PR_SET_PDEATHSIG = 1


class Stopped(KeyboardInterrupt):
    """The person stopped the run (Ctrl-C). The message says what is kept and how to go on."""


class Terminated(Stopped):
    """The system stopped the run (SIGTERM), or the trainer was told to stop: to be started again, not a failure."""


@dataclass
class Role:
    """One process of a run. `name` is also the name of its log; `env` is added to the launcher's environment.

    server: others need it to end well (ledger, store), so it is stopped after them.
    """

    name: str
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    server: bool = False


class Child:
    """A running role. Its stdout and stderr are appended to `logs/<name>.log`."""

    def __init__(self, role: Role, logs: Path):
        self.role = role
        self.log = logs / f"{role.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.restarts = 0
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.log_start = out.tell()
            self.process = subprocess.Popen(
                self.role.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.role.env},
                start_new_session=True,
                preexec_fn=_die_with_launcher,
            )

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs; negative: ended by that signal."""
        return self.process.poll()

    def signal(self, number: int) -> None:
        if self.status is None:
            self.process.send_signal(number)

    def said(self) -> str:
        """What it wrote since its last start."""
        with self.log.open("rb") as log:
            log.seek(self.log_start)
            return log.read().decode(errors="replace")


class Crew:
    """All children of a run. Helpers (store, ledger, producers) that die are started again, up to a limit."""

    def __init__(self, logs: Path, max_restarts: int):
        self._logs, self._max_restarts = logs, max_restarts
        self.helpers: list[Child] = []
        self.trainer: Child | None = None

    @property
    def children(self) -> list[Child]:
        return [*self.helpers, *([self.trainer] if self.trainer else [])]

    def start_helper(self, role: Role) -> Child:
        child = Child(role, self._logs)
        self.helpers.append(child)
        return child

    def start_trainer(self, role: Role) -> Child:
        self.trainer = Child(role, self._logs)
        return self.trainer

    def tend(self) -> list[str]:
        """Restart the helpers that died. Returns a line for each; raises UserError when one cannot be kept alive."""
        lines = []
        for child in self.helpers:
            status = child.status
            if status is None:
                continue
            if status == USER_ERROR or child.restarts >= self._max_restarts:
                again = f" after {child.restarts} restarts" if child.restarts else ""
                raise failure(child, f"{child.role.name} {describe(status)}{again}")
            child.restarts += 1
            child.start()
            lines.append(f"{child.role.name} {describe(status)}: restarted ({child.restarts} of {self._max_restarts})")
        return lines

    def stop(self, grace: float = 10.0) -> None:
        """End every child: SIGTERM, after `grace` seconds SIGKILL; servers when those that talk to them are gone."""
        kin = [pid for child in self.children for pid in _descendants(child.process.pid)]
        for servers in (False, True):
            wave = [child for child in self.children if child.role.server is servers]
            for child in wave:
                child.signal(signal.SIGTERM)
            deadline = time.monotonic() + grace
            while any(c.status is None for c in wave) and time.monotonic() < deadline:
                time.sleep(0.05)
            for child in wave:
                child.signal(signal.SIGKILL)
                child.process.wait()
        for pid, started in kin:  # what a child started itself and did not take along
            if started and _start_time(pid) == started:
                os.kill(pid, signal.SIGKILL)


def failure(child: Child, what: str) -> UserError:
    """The cause, from what the child said last: its own `error: …` if it printed one, else the end of its log."""
    lines = [line for line in child.said().splitlines() if line.strip()]
    own = _user_error(lines)
    if own is not None:
        own.where = "; ".join(filter(None, [own.where, f"said by {child.role.name}, in {child.log}"]))
        return own
    tail = "\n".join(f"  | {line[:200]}" for line in _cause(lines))
    return UserError(f"{what}\n{tail}" if tail else what, where=str(child.log), fix="the log has the whole story")


def _user_error(lines: list[str]) -> UserError | None:
    """The first `error: …` block that was printed with the command line's format, parsed back.

    The first, because the other ranks then fail for want of the one that stopped.
    """
    for i, line in enumerate(lines):
        if line.startswith("error: "):
            what, places = [line.removeprefix("error: ")], {}
            for follower in lines[i + 1 :]:
                key, _, value = follower.removeprefix("  ").partition(":")
                if key in ("where", "fix"):
                    places[key] = value.strip()
                elif not follower.startswith("  ") or places:
                    break
                else:
                    what.append(follower)
            return UserError("\n".join(what), where=places.get("where"), fix=places.get("fix"))
    return None


def _cause(lines: list[str], room: int = 12) -> list[str]:
    """The lines that say why: the first traceback's end if there is one, else the last lines."""
    for i, line in enumerate(lines):
        if "Traceback (most recent call last)" in line:
            for j in range(i + 1, len(lines)):
                text = lines[j].partition("]: ")[2] if lines[j].startswith("[rank") else lines[j]
                if text and not text.startswith((" ", "Traceback")):
                    return lines[max(i, j - room + 1) : j + 1]
    return lines[-room:]


def describe(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"exited with status {status}"


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def claim_port(key: str, host: str, port: int) -> int:
    """The port to use: `port`, checked to be free, or any free one for 0. Raises UserError naming the key."""
    if port == 0:
        return free_port(host)
    with socket.socket() as probe:
        # As the servers do: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(
                f"port {port} is in use" if error.errno == 98 else f"port {port} cannot be used: {error.strerror}",
                where=f"{key} on {host}",
                fix=f"stop what listens there, or set {key}=0 for any free port",
            ) from error
    return port


def _load_prctl():
    if not sys.platform.startswith("linux"):
        return None
    return ctypes.CDLL(None, use_errno=True).prctl


_prctl = _load_prctl()  # loaded before any fork: the child does as little as possible between fork and exec


def _die_with_launcher() -> None:
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _descendants(root: int) -> list[tuple[int, str]]:
    """(pid, start time) of every process below `root`. Linux only; elsewhere nothing is found."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found, todo = [], [root]
    while todo:
        for pid in children.get(todo.pop(), []):
            found.append((pid, _start_time(pid)))
            todo.append(pid)
    return found


def _start_time(pid: int) -> str:
    """Tells a process from a later one with the same number; empty if there is none (or it is a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
