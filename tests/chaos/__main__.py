"""`python -m tests.chaos --seed 1 --faults 40`: see the package's text. Exit status 0 only if everything held."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from . import audit
from .faults import Fault, Tormentor, plan
from .victim import INTERRUPTED, PREEMPTED, Ended, Victim
from .wounds import Guests, NotNow, shared_memory

STEPS_PER_FAULT = 8  # the run takes about 3 steps between two faults on 2 slow cores, more on a fast machine
BATCH = 4
_PATIENCE = 240.0  # seconds without a step, before the run counts as stuck
_HASTY_SECONDS = 2.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="A run under violence.")
    parser.add_argument("--seed", type=int, default=None, help="of the faults; default: a random one")
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--steps", type=int, default=0, help="of the run; default: enough for the faults")
    parser.add_argument("--folder", type=Path, default=None, help="for the runs and their logs; kept when it fails")
    options = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    folder = options.folder or Path(tempfile.mkdtemp(prefix="draftsmith-chaos-"))
    steps = options.steps or STEPS_PER_FAULT * options.faults
    return Chaos(folder, seed, plan(seed, options.faults), steps).run()


class Chaos:
    def __init__(self, folder: Path, seed: int, faults: list[Fault], steps: int):
        self.folder, self.seed, self.faults, self.steps = folder, seed, faults, steps
        self.began = time.monotonic()
        self.lost: int | str = "unknown"
        self.twice: int | str = "unknown"
        self.identical = False

    def run(self) -> int:
        self.say(f"seed={self.seed} faults={len(self.faults)} steps={self.steps} folder={self.folder}")
        memory = shared_memory()
        undisturbed = Victim(self.folder / "undisturbed", self.steps)
        victim = Victim(self.folder / "tormented", self.steps)
        guests = Guests(victim)
        tormentor = Tormentor(victim, guests, self.seed)
        wrong, finished = [], False
        try:
            undisturbed.start()
            undisturbed.run_to_end(1200)
            self.say("the undisturbed run is finished; now the same under violence")
            victim.start()
            self.torment(victim, tormentor)
            self.say("no more faults: to the end")
            self.calm(victim)
            finished = True
            guests.close()
            wrong += leftovers(victim, memory)
        except (Ended, TimeoutError) as error:
            wrong.append(str(error))
        finally:
            for run in (undisturbed, victim):
                if run.starts:
                    run.end()
            guests.close()
        if finished:
            wrong += self.audit(undisturbed, victim)
        return self.judge(victim, tormentor, wrong)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    def torment(self, victim: Victim, tormentor: Tormentor) -> None:
        """One fault after the other, each after the run has come on by a step, or, if it is hasty, after two seconds."""
        for number, fault in enumerate(self.faults, 1):
            self.wait_for_step(victim, _HASTY_SECONDS if fault.hasty else _PATIENCE, may_stall=fault.hasty)
            time.sleep(fault.pause)
            said = self.inflict(victim, tormentor, fault)
            self.say(f"fault {number:2}  step {victim.steps():4}  {fault}{f': {said}' if said else ''}")

    def inflict(self, victim: Victim, tormentor: Tormentor, fault: Fault) -> str:
        """As soon as it can be done: whom it is meant for may be starting."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            self.check(victim)
            try:
                return tormentor.inflict(fault)
            except NotNow as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{fault} was impossible for {_PATIENCE:.0f} s: {error}") from error
                time.sleep(0.2)

    def wait_for_step(self, victim: Victim, seconds: float, *, may_stall: bool) -> None:
        before, deadline = victim.steps(), time.monotonic() + seconds
        while victim.steps() == before:
            self.check(victim)
            if time.monotonic() > deadline:
                if may_stall:
                    return
                raise TimeoutError(f"stuck: no step for {seconds:.0f} s")
            time.sleep(0.05)

    def calm(self, victim: Victim) -> None:
        """To the end of the run. Raises TimeoutError when it stands still for too long."""
        steps, since = victim.steps(), time.monotonic()
        while (status := victim.look()) is None:
            if victim.steps() != steps:
                steps, since = victim.steps(), time.monotonic()
            if time.monotonic() - since > _PATIENCE:
                raise TimeoutError(f"stuck: no step for {_PATIENCE:.0f} s")
            time.sleep(0.3)
        if status in (PREEMPTED, INTERRUPTED):  # told to stop by a fault that came late
            victim.start()
            self.calm(victim)
        elif status != 0:
            raise Ended(f"the launcher ended with status {status}")

    def check(self, victim: Victim) -> None:
        status = victim.look()
        if status == 0:
            raise Ended("the run was finished before all faults were done: give it more --steps")
        if status is not None:
            raise Ended(f"the launcher ended with status {status}, and nobody had asked it to")

    def audit(self, undisturbed: Victim, victim: Victim) -> list[str]:
        self.lost, self.twice, wrong = audit.audit_packs(victim.run_dir / "logs" / "trainer.log", self.steps, BATCH)
        wrong += audit.audit_metrics(victim.run_dir, self.steps)
        weights = [audit.summary(run.run_dir)["weights_sha256"] for run in (undisturbed, victim)]
        self.identical = weights[0] == weights[1]
        return wrong if self.identical else [*wrong, f"weights {weights[1]}, undisturbed {weights[0]}"]

    def judge(self, victim: Victim, tormentor: Tormentor, wrong: list[str]) -> int:
        for line in wrong:
            self.say(f"WRONG: {line}")
        counts = tormentor.counts
        restarted = audit.restarts(victim.log) if victim.log.exists() else 0
        numbers = " ".join(f"{name}={counts[name]}" for name in ("kills", "hangs", "corruptions", "cuts", "stops"))
        print(
            f"seed={self.seed} {numbers} restarts={restarted + max(victim.starts - 1, 0)} "
            f"packs_lost={self.lost} packs_twice={self.twice} weights_identical={'yes' if self.identical else 'no'}"
        )
        if wrong:
            print(f"the logs are in {self.folder}; again: python -m tests.chaos --seed {self.seed}", file=sys.stderr)
        return 1 if wrong else 0


def leftovers(victim: Victim, memory_before: set[str]) -> list[str]:
    """Processes, ports, shared memory that a finished run has not given back. (The store's objects were in them.)"""
    found = [f"left alive: {process}" for process in victim.survivors()]
    found += [f"port {port} is still open" for port in victim.open_ports()]
    found += [f"left in /dev/shm: {name}" for name in sorted(shared_memory() - memory_before)]
    return found


if __name__ == "__main__":
    raise SystemExit(main())
