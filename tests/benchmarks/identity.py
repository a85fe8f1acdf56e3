"""`python -m tests.benchmarks.identity`: one recipe, run in many ways, gives one drafter, bit for bit.

The tiny recipe on real processes: other numbers of producers, slow ones, every source, killed and resumed at five points, a
rank killed. Prints the hash of the weights for each way; exit status 0 only if all are equal.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from tests.launch.runs import read_summary, run, started, steps, wait_for

POINTS = (2, 4, 6, 8, 10)
QUICK = ("evaluate=none", "checkpoint.every=1", "checkpoint.keep=3")


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="draftsmith-identity-"))
    ways: dict[str, Callable[[Path], None]] = {
        "2 producers, 2 ranks, stream": plainly(),
        "1 producer": plainly("cluster.producers=1"),
        "3 producers": plainly("cluster.producers=3"),
        "producers that stand still nine tenths of the time": throttled,
        "prefetch of 1": plainly("source.prefetch=1"),
        "store=filesystem": plainly("store=filesystem"),
        "source=hybrid": plainly("source=hybrid"),
        "source=offline": plainly("source=offline"),
        "source=colocated": plainly("source=colocated"),
        f"the launcher killed at steps {', '.join(map(str, POINTS))}": killed_at_points,
        "a rank killed at step 6": a_rank_killed,
    }
    weights = set()
    for number, (way, make) in enumerate(ways.items()):
        run_dir = folder / f"{number:02d}"
        make(run_dir)
        weights.add(found := read_summary(run_dir)["weights_sha256"])
        print(f"{found[:16]}  {way}", flush=True)
    print(f"weights_identical={'yes' if len(weights) == 1 else 'no'}  ({folder})")
    return len(weights) != 1


def plainly(*overrides: str) -> Callable[[Path], None]:
    def make(run_dir: Path) -> None:
        done = run(run_dir, *QUICK, *overrides)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)

    return make


def throttled(run_dir: Path) -> None:
    ended = threading.Event()
    with started(run_dir, *QUICK) as (launcher, _):
        brake = threading.Thread(target=_brake, args=(launcher.pid, ended))
        brake.start()
        try:
            launcher.wait(600)
        finally:
            ended.set()
            brake.join()


def _brake(launcher: int, ended: threading.Event) -> None:
    """Producers run for 50 ms of every half second."""
    while not ended.wait(0.05):
        with suppress(psutil.NoSuchProcess):
            producers = [p for p in psutil.Process(launcher).children() if "produce" in p.cmdline()]
            for number, pause in ((signal.SIGSTOP, 0.45), (signal.SIGCONT, 0.0)):
                for producer in producers:
                    producer.send_signal(number)
                ended.wait(pause)


def killed_at_points(run_dir: Path) -> None:
    for point in POINTS:
        with started(run_dir, *QUICK) as (launcher, _):
            wait_for(lambda point=point: steps(run_dir) >= point, launcher)
            launcher.kill()
            launcher.wait()
    plainly()(run_dir)


def a_rank_killed(run_dir: Path) -> None:
    with started(run_dir, *QUICK) as (launcher, _):
        wait_for(lambda: steps(run_dir) >= 6, launcher)
        family = psutil.Process(launcher.pid).children(recursive=True)
        next(p for p in family if "trainer.train" in p.cmdline() and "torch.distributed.run" not in p.cmdline()).kill()
        launcher.wait(600)


if __name__ == "__main__":
    sys.exit(main())
