"""How a child ended, and why, as its own log tells it."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from data_pipelines.errors import UserError
from data_pipelines.logs import readable

USER_ERROR = 2  # exit status of a process that printed `error: …`; starting it again would end the same way
# What torchrun writes of each rank that it saw fail; its own status is 1 whatever that was.
_RANK = re.compile(r"^\s*rank\s+: (\d+) .*\n\s*exitcode\s+: (-?\d+) ", re.MULTILINE)


@dataclass(frozen=True)
class Ending:
    """what: who ended and how. final: another try would end the same way. words: the exception that ended it; empty
    for a signal, which says nothing about the program."""

    what: str
    final: bool
    words: str = ""


def ending(name: str, status: int, said: str) -> Ending:
    """How the child `name` ended that wrote `said` since its start. status: as subprocess gives it."""
    ranks = [(int(rank), int(code)) for rank, code in _RANK.findall(said)]
    if status == USER_ERROR or any(code == USER_ERROR for _, code in ranks):
        return Ending(f"{name} {describe(status)}", final=True)
    # torchrun ends the other ranks by SIGTERM, and names the one that failed first at the end.
    killed = [r for r in ranks if r[1] < 0 and r[1] != -signal.SIGTERM] + [r for r in ranks[-1:] if r[1] < 0]
    if killed:
        return Ending(f"{name} (rank {killed[0][0]}) {describe(killed[0][1])}", final=False)
    if status < 0:
        return Ending(f"{name} {describe(status)}", final=_user_error(_lines(said)) is not None)
    return Ending(f"{name} {describe(status)}", final=False, words=_exception(_lines(said)))


def told_to_stop(said: str, preempted: int) -> bool:
    """Whether the ranks (with the exit status `preempted`) or torchrun itself obeyed a signal to stop."""
    by_signal = any(f"got signal: {number:d}" in said for number in (signal.SIGTERM, signal.SIGUSR1))
    return by_signal or any(int(code) == preempted for _, code in _RANK.findall(said))


def failure(name: str, log: str, said: str, what: str) -> UserError:
    """The cause, from what the child said last: its own `error: …` if it printed one, else the end of its log."""
    lines = _lines(said)
    own = _user_error(lines)
    if own is not None:
        own.where = "; ".join(filter(None, [own.where, f"said by {name}, in {log}"]))
        return own
    tail = "\n".join(f"  | {readable(line)[:200]}" for line in _cause(lines))
    return UserError(f"{what}\n{tail}" if tail else what, where=log, fix="the log has the whole story")


def describe(status: int) -> str:
    number = -status if status < 0 else status - 128  # srun says it as shells do
    if number in iter(signal.Signals):
        return f"was ended by {signal.Signals(number).name}"
    return f"exited with status {status}"


def _lines(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.strip()]


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
    span = _traceback(lines)
    if span is None:
        return lines[-room:]
    begin, end = span
    return lines[max(begin, end - room + 1) : end + 1]


def _exception(lines: list[str]) -> str:
    """The line that names the first exception, without the rank that torch puts before it."""
    span = _traceback(lines)
    return _unprefixed(lines[span[1]]) if span else ""


def _traceback(lines: list[str]) -> tuple[int, int] | None:
    """First and last line of the first traceback that was not only logged: of the exception that nobody caught."""
    for i, line in enumerate(lines):
        if _unprefixed(line).startswith("Traceback (most recent call last)"):  # indented: only logged
            for j in range(i + 1, len(lines)):
                text = _unprefixed(lines[j])
                if text and not text.startswith((" ", "Traceback")):
                    return i, j
    return None


def _unprefixed(line: str) -> str:
    return line.partition("]: ")[2] if line.startswith("[rank") else line
