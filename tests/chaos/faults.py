"""What can be done to a run, and the schedule that a seed gives."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from trainer.checkpoint import whole_checkpoints

from ..data_pipelines.stream.rogue import CRIMES
from . import wounds
from .victim import Ended, Victim
from .wounds import Guests, NotNow

HELPERS = ("producer-0", "producer-1", "ledger", "mooncake")
TRAINER = ("rank-0", "rank-1", "torchrun")


@dataclass(frozen=True)
class Fault:
    """kind: one of KINDS. role: to whom. seconds: for how long. detail: which crime, which signal.

    pause: seconds between the run's next step and this fault. hasty: it does not wait for that step.
    """

    kind: str
    role: str = ""
    seconds: float = 0.0
    detail: str = ""
    pause: float = 0.0
    hasty: bool = False

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        return " ".join(filter(None, [self.kind, self.role, self.detail])) + lasting


# Kind → (how often it comes, what it is counted as, whom it can be done to). Not among them: the launcher frozen for
# good, since nobody is left then who could notice.
KINDS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "kill": (8, "kills", (*HELPERS, *HELPERS, *TRAINER)),
    "freeze": (3, "hangs", (*HELPERS, *TRAINER)),
    "freeze for a while": (4, "hangs", (*HELPERS, *TRAINER, "launcher")),
    "cut the connections of": (4, "cuts", (*HELPERS, "rank-0", "rank-1")),
    "kill launcher": (1, "kills", ()),
    "stop launcher": (2, "stops", ()),
    "spoil the newest checkpoint": (1, "corruptions", ()),
    "remove objects": (2, "corruptions", ()),
    "flip bits in": (3, "corruptions", ("producer-0", "producer-1")),
    "rogue producer": (4, "corruptions", ()),
    "guest producer": (1, "guests", ()),
    "guest producer on a bad cable": (2, "cuts", ()),
}


def plan(seed: int, count: int) -> list[Fault]:
    """Every kind once if there is room for it, the rest by weight; in random order."""
    rng = random.Random(seed)
    kinds = list(KINDS)
    if count < len(kinds):
        chosen = rng.sample(kinds, count)
    else:
        weights = [weight for weight, _, _ in KINDS.values()]
        chosen = kinds + rng.choices(kinds, weights, k=count - len(kinds))
        rng.shuffle(chosen)
    return [_draw(kind, rng) for kind in chosen]


def _draw(kind: str, rng: random.Random) -> Fault:
    roles = KINDS[kind][2]
    role = rng.choice(roles) if roles else ""
    seconds, detail = 0.0, ""
    if kind in ("freeze for a while", "guest producer on a bad cable"):
        seconds = rng.uniform(1.0, 7.0)
    elif kind == "guest producer":
        seconds = rng.uniform(8.0, 20.0)
    if kind == "stop launcher":
        detail = rng.choice(["SIGINT", "SIGTERM"])
    elif kind == "rogue producer":
        detail = rng.choice(sorted(CRIMES))
    elif kind == "guest producer on a bad cable":
        detail = rng.choice(["reset", "silent"])
    return Fault(kind, role, seconds, detail, pause=rng.uniform(0.0, 1.0), hasty=rng.random() < 0.25)


class Tormentor:
    """Inflicts faults on a victim. `counts` by what KINDS counts them as."""

    def __init__(self, victim: Victim, guests: Guests, seed: int):
        self._victim, self._guests, self._rng = victim, guests, random.Random(seed + 1)
        self.counts: Counter[str] = Counter()

    def inflict(self, fault: Fault) -> str:
        """Returns what happened, in a word or two. Raises NotNow when it cannot be done at the moment."""
        try:
            said = _DEEDS[fault.kind](self, fault)
        except (psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError) as error:
            raise NotNow(str(error)) from error
        except PermissionError as error:  # connections and memory of others need ptrace's rights
            return f"NOT DONE: {error}"
        self.counts[KINDS[fault.kind][1]] += 1
        return said or ""

    def _process(self, role: str) -> psutil.Process:
        process = self._victim.process(role)
        if process is None:
            raise NotNow(f"there is no {role}")
        return process

    def _kill(self, fault: Fault) -> None:
        self._process(fault.role).kill()

    def _freeze(self, fault: Fault) -> None:
        wounds.freeze(self._process(fault.role), fault.seconds)

    def _cut(self, fault: Fault) -> str:
        return _some(wounds.cut_connections(self._process(fault.role)), "connections")

    def _kill_launcher(self, fault: Fault) -> None:
        self._end_launcher(signal.SIGKILL)
        self._victim.start()

    def _stop_launcher(self, fault: Fault) -> str:
        status = self._end_launcher(signal.Signals[fault.detail])
        self._victim.start()
        return f"status {status}"

    def _spoil(self, fault: Fault) -> str:
        """While nobody writes checkpoints: the launcher is killed first."""
        if len(whole_checkpoints(self._victim.run_dir / "checkpoints")) < 2:
            raise NotNow("there is no older checkpoint to fall back to")
        self._end_launcher(signal.SIGKILL)
        try:
            return wounds.spoil_checkpoint(self._victim, self._rng)
        finally:
            self._victim.start()

    def _end_launcher(self, number: int) -> int:
        process = self._process("launcher")
        if process.status() == psutil.STATUS_STOPPED:
            process.resume()
        self._victim.look()
        status = self._victim.interrupt(number)
        if status == 0:
            raise Ended("the run was finished before it could be stopped: give it more --steps")
        # Its children end with it; a new one would find their ports and the folder's lock in use.
        if left := self._victim.survivors(60):
            raise Ended(f"still alive 60 s after their launcher: {left}")
        return status

    def _remove_objects(self, fault: Fault) -> str:
        return _some(wounds.remove_objects(self._victim, 3), "objects")

    def _flip_bits(self, fault: Fault) -> str:
        return _some(wounds.flip_bits(self._process(fault.role), self._rng), "payloads")

    def _rogue(self, fault: Fault) -> None:
        self._process("ledger")
        self._guests.rogue(fault.detail, times=2)

    def _guest(self, fault: Fault) -> None:
        self._process("ledger")
        self._guests.honest(fault.seconds)

    def _guest_on_cable(self, fault: Fault) -> None:
        self._process("ledger")
        self._guests.behind_cable(fault.seconds, reset=fault.detail == "reset")


def _some(count: int, what: str) -> str:
    """A fault that touched nothing is none."""
    if not count:
        raise NotNow(f"there are no {what}")
    return f"{count} {what}"


_DEEDS: dict[str, Callable[[Tormentor, Fault], str | None]] = {
    "kill": Tormentor._kill,
    "freeze": Tormentor._freeze,
    "freeze for a while": Tormentor._freeze,
    "cut the connections of": Tormentor._cut,
    "kill launcher": Tormentor._kill_launcher,
    "stop launcher": Tormentor._stop_launcher,
    "spoil the newest checkpoint": Tormentor._spoil,
    "remove objects": Tormentor._remove_objects,
    "flip bits in": Tormentor._flip_bits,
    "rogue producer": Tormentor._rogue,
    "guest producer": Tormentor._guest,
    "guest producer on a bad cable": Tormentor._guest_on_cable,
}
