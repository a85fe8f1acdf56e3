"""The run that is tormented: a launcher like a person's, started again with the same command whenever it was ended."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
from omegaconf import OmegaConf

ROOT = Path(__file__).parents[2]
RECIPE = "ci_eagle3"
# Tiny steps, and everything that waits for something waits for seconds instead of minutes.
OVERRIDES = [
    "epochs=200", "global_batch=4", "drafter.steps=2", "data.pack_tokens=128", "data.max_document_tokens=128",
    "checkpoint.every=5", "checkpoint.keep=3", "evaluate=none", "resume=auto",
    "source.prefetch=4", "source.lease_seconds=5", "source.max_attempts=1000",
    "source.patience_seconds=200", "parallel.timeout_seconds=300", "store.transfer_timeout_seconds=3",
    "store.segment_bytes=67108864", "store.buffer_bytes=16777216", "cluster.max_restarts=1000", "cluster.hang_seconds=8",
]  # fmt: skip
PREEMPTED, INTERRUPTED = 75, 130
STEP = re.compile(rb"role=rank-0 msg=step step=")


class Ended(Exception):
    """The launcher ended although nobody had ended it."""


class Victim:
    """folder: gets the run's folder `run`, and `launcher.log`. Knows every process that was ever part of the run."""

    def __init__(self, folder: Path, steps: int):
        self.folder, self.run_dir, self.log = folder, folder / "run", folder / "launcher.log"
        folder.mkdir(parents=True, exist_ok=True)
        self.command = [sys.executable, "-m", "launch.cli", "run", RECIPE, f"run_dir={self.run_dir}", *OVERRIDES]
        self.command.append(f"max_steps={steps}")
        self.family: set[psutil.Process] = set()
        self.ports: set[int] = set()
        self.starts = 0
        self._bytes_read, self._steps = 0, 0

    def start(self) -> None:
        self.starts += 1
        with self.log.open("a") as out:
            out.write(f"--- start {self.starts}\n")
            out.flush()
            self.launcher = subprocess.Popen(self.command, stdout=out, stderr=out, cwd=ROOT)
        self.family.add(psutil.Process(self.launcher.pid))

    def look(self) -> int | None:
        """Notes processes and ports. Returns the launcher's exit status, None while it runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.family |= set(psutil.Process(self.launcher.pid).children(recursive=True))
        try:
            connected = self.config()
            for address in (connected.source.ledger, connected.store.master):
                if address:
                    self.ports.add(int(address.rpartition(":")[2]))
        except (OSError, ValueError, AttributeError):
            pass  # the launcher is writing it, or has not come so far
        return self.launcher.poll()

    def config(self):
        return OmegaConf.load(self.run_dir / "config.yaml")

    def steps(self) -> int:
        """How many steps rank 0 has done in all, those of lost work included: it only grows."""
        log = self.run_dir / "logs" / "trainer.log"
        if log.exists():
            with log.open("rb") as lines:
                lines.seek(self._bytes_read)
                whole, newline, _ = lines.read().rpartition(b"\n")
            self._bytes_read += len(whole + newline)
            self._steps += len(STEP.findall(whole))
        return self._steps

    def process(self, role: str) -> psutil.Process | None:
        """The living process of a role: launcher, ledger, mooncake, producer-<i>, torchrun, rank-<i>."""
        if role == "launcher":
            return psutil.Process(self.launcher.pid) if self.launcher.poll() is None else None
        try:
            children = psutil.Process(self.launcher.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return None
        for child in children:
            try:
                if child.status() != psutil.STATUS_ZOMBIE and _role(child) == role:
                    return child
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return None

    def metrics_port(self) -> int:
        """Of the store's master. Raises ProcessLookupError when there is none."""
        master = self.process("mooncake")
        if master is None:
            raise ProcessLookupError("there is no mooncake")
        [port] = [word.partition("=")[2] for word in master.cmdline() if word.startswith("--metrics_port=")]
        return int(port)

    def objects(self) -> list[str]:
        """The keys in the store now."""
        url = f"http://127.0.0.1:{self.metrics_port()}/get_all_keys"
        return httpx.get(url, trust_env=False, timeout=5).text.split()

    def end(self) -> None:
        """Nothing of the run is left alive."""
        self.look()
        for process in self.family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.launcher.wait()

    def survivors(self, seconds: float = 20.0) -> list[psutil.Process]:
        return psutil.wait_procs(self.family, timeout=seconds)[1]

    def open_ports(self) -> list[int]:
        """Ports of the run on which still somebody listens."""
        found = []
        for port in sorted(self.ports):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    found.append(port)
        return found

    def run_to_end(self, seconds: float) -> None:
        """Undisturbed. Raises Ended when it fails, TimeoutError when it takes longer."""
        deadline = time.monotonic() + seconds
        while (status := self.look()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the run is not finished after {seconds:.0f} s")
            time.sleep(0.5)
        if status != 0:
            raise Ended(f"the launcher ended with status {status}")

    def interrupt(self, number: int, seconds: float = 90.0) -> int:
        """Ctrl-C (SIGINT), SIGTERM or SIGKILL for the launcher alone. Returns its exit status."""
        self.launcher.send_signal(number)
        try:
            return self.launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            self.launcher.send_signal(signal.SIGINT)  # once more to stop at once
            return self.launcher.wait(60)


def _role(process: psutil.Process) -> str:
    words = process.cmdline()
    if "torch.distributed.run" in words:
        return "torchrun"
    if "trainer.train" in words:
        rank = process.environ().get("RANK")
        return f"rank-{rank}" if rank is not None else ""
    if words and words[0].endswith("mooncake_master"):
        return "mooncake"
    if "produce" in words and "--name" in words:
        return words[words.index("--name") + 1]
    is_ledger = "data_pipelines.stream.server" in words or words[2:4] == ["launch.cli", "ledger"]
    return "ledger" if is_ledger else ""
