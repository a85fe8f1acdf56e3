"""The processes of a run on one machine: started, watched, restarted, stopped, and never left behind.

Every child leads a session of its own, so that a Ctrl-C in the terminal reaches the launcher alone, which then stops
the children in the right order. On Linux the kernel also kills each child when the launcher dies without a word (SIGKILL, out
of memory): nobody is left then to wait for, and what is on disk is whole at any moment.
"""

from __future__ import annotations

import os
import signal
import site
import socket
import subprocess
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import data_pipelines
from data_pipelines.errors import UserError
from data_pipelines.orphans import end_with

from .failures import Ending, ending, failure

HEALTHY_SECONDS = 600.0  # a child that ran for as long has put its earlier troubles behind it


class Stopped(KeyboardInterrupt):
    """The person stopped the run (Ctrl-C). The message says what is kept and how to go on."""


class Terminated(Stopped):
    """The system stopped the run (SIGTERM), or the trainer was told to stop: to be started again, not a failure."""


@dataclass
class Role:
    """One process of a run. `name` is also the name of its log; `env` is added to the launcher's environment.

    server: others need it to end well (ledger, store), so it is stopped after them. elsewhere: the child is only what
    carries it to another machine.
    """

    name: str
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    server: bool = False
    elsewhere: bool = False


def only_ours() -> dict[str, str]:
    """The environment in which a child imports our packages, whatever lies in the folder that it is started from: `python -m`
    would put that folder first, and a person's own conf.py or trainer.py would be taken for ours."""
    packages = str(Path(data_pipelines.__file__).parents[1])
    installed = {*site.getsitepackages(), site.getusersitepackages()}
    paths = [*([] if packages in installed else [packages]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONSAFEPATH": "1", **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}


class Child:
    """A running role. Its stdout and stderr are appended to `logs/<name>.log`.

    restarts: since it last ran for HEALTHY_SECONDS. hung: what it failed to do when it was ended for doing nothing.
    """

    def __init__(self, role: Role, logs: Path):
        self.role = role
        self.log = logs / f"{role.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.restarts = 0
        self._failed: tuple[int, str] | None = None
        self.start()

    def start(self) -> None:
        self.hung = ""
        self.started = time.monotonic()
        with self.log.open("ab") as out:
            self.log_start = out.tell()
            self.process = subprocess.Popen(
                self.role.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **only_ours(), **self.role.env},
                start_new_session=True,
                preexec_fn=partial(end_with, os.getpid()),
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

    def ending(self) -> Ending:
        if self.hung:
            return Ending(f"{self.role.name} was ended because {self.hung}", final=False)
        return ending(self.role.name, self.process.returncode, self.said())

    def failure(self, what: str) -> UserError:
        return failure(self.role.name, str(self.log), self.said(), what)

    def failed_alike(self, step: int, words: str) -> bool:
        """Whether it ended at this step with these words the last time, too. Remembers them for the next time."""
        alike = bool(words) and self._failed == (step, words)
        self._failed = (step, words)
        return alike


class Crew:
    """All children of a run. One that dies is started again, up to a limit.

    An `srun` that is ended, by whichever signal, has Slurm end its tasks at once and for certain: a frozen one as well.
    """

    def __init__(self, logs: Path, max_restarts: int):
        self._logs, self._max_restarts = logs, max_restarts
        self.helpers: list[Child] = []
        self.trainer: Child | None = None
        self.restarted: Counter[str] = Counter()  # over the whole run, by role

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
        return [self.revive(child) for child in self.helpers if child.status is not None]

    def revive(self, child: Child, *, step: int | None = None) -> str:
        """Start a child that has ended again. Returns the line that says so.

        step: where the training stood. Raises UserError with the child's own cause when it would end the same way: it
        said `error: …`, failed twice at the same step with the same words, or was started often enough.
        """
        how = child.ending()
        if time.monotonic() - child.started > HEALTHY_SECONDS:
            child.restarts = 0
        again = f" after {child.restarts} restart{'s' if child.restarts > 1 else ''}" if child.restarts else ""
        if how.final or child.restarts >= self._max_restarts:
            raise child.failure(f"{how.what}{again}")
        if step is not None and child.failed_alike(step, how.words):
            raise child.failure(f"{how.what} twice at step {step} in the same way: a third time would be no better")
        child.restarts += 1
        self.restarted[child.role.name] += 1
        child.start()
        return f"{how.what}: restarted ({child.restarts} of {self._max_restarts})"

    def stop(self, grace: float = 10.0) -> None:
        """End every child: SIGTERM, after `grace` seconds SIGKILL; servers when those that talk to them are gone."""
        kin = [pid for child in self.children for pid in descendants(child.process.pid)]
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
        _end(kin)  # what a child started itself and did not take along


def end_hung(child: Child, process: subprocess.Popen, why: str) -> None:
    """SIGKILL for a child that does nothing, with all that it started. May be called from any thread.

    process: the life of the child that was judged; a later one is left alone.
    """
    if child.process is not process or process.poll() is not None:
        return
    child.hung = why
    kin = descendants(process.pid)
    process.kill()
    _end(kin)


def _end(kin: list[tuple[int, str]]) -> None:
    for pid, started in kin:
        if started and _start_time(pid) == started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


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


def descendants(root: int) -> list[tuple[int, str]]:
    """(pid, start time) of every process below `root`. Linux only; elsewhere nothing is found."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        children.setdefault(parent_of(int(folder.name)), []).append(int(folder.name))
    found, todo = [], [root]
    while todo:
        for pid in children.get(todo.pop(), []):
            found.append((pid, _start_time(pid)))
            todo.append(pid)
    return found


def parent_of(pid: int) -> int:
    """0 if there is no such process. Linux only."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def cpu_seconds(pids: list[int]) -> float:
    """Of the processes that are there, together. Linux only."""
    ticks = 0
    for pid in pids:
        with suppress(OSError, IndexError, ValueError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _start_time(pid: int) -> str:
    """Tells a process from a later one with the same number; empty if there is none (or it is a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
