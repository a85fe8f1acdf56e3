"""What the benchmarks share: processes that are started, looked at from outside, and stopped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil

from data_pipelines.stores.mooncake import library_path, master_command, wait_ready
from launch.supervision.processes import free_port

HOST = "127.0.0.1"


class Processes:
    """The processes of one benchmark, by name. Each writes `<folder>/<name>.log`. As a context: all are ended."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.running: dict[str, psutil.Popen] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_) -> None:
        for process in self.running.values():
            if process.is_running():
                process.kill()
        for process in self.running.values():
            process.wait()

    def start(self, name: str, *command: str, env: dict[str, str] | None = None) -> psutil.Popen:
        with (self.folder / f"{name}.log").open("w") as log:
            self.running[name] = psutil.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})},
            )
        return self.running[name]

    def python(self, name: str, *arguments: str) -> psutil.Popen:
        return self.start(name, sys.executable, "-m", *arguments)

    def start_master(self) -> Master:
        port, metrics = free_port(HOST), free_port(HOST)
        libraries = ":".join(filter(None, [library_path(), os.environ.get("LD_LIBRARY_PATH")]))
        environment = {"LD_LIBRARY_PATH": libraries} if libraries else {}
        process = self.start("master", *master_command(HOST, port, metrics), env=environment)
        wait_ready(HOST, port, metrics, process=process)
        return Master(f"{HOST}:{port}", f"http://{HOST}:{metrics}")

    def wait_for(self, condition, seconds: float = 600.0) -> None:
        """Raises RuntimeError, with the end of its log, when a process has ended meanwhile, or the time is over."""
        deadline = time.monotonic() + seconds
        while not condition():
            for name, process in self.running.items():
                if process.poll() is not None:
                    raise RuntimeError(f"{name} ended with {process.returncode}:\n{self.said(name)[-2000:]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"not after {seconds:.0f} s")
            time.sleep(0.05)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")


class Master:
    """A running mooncake_master, seen through its HTTP port."""

    def __init__(self, address: str, metrics: str):
        self.address = address
        self._http = httpx.Client(base_url=metrics, trust_env=False, timeout=10)

    def keys(self) -> list[str]:
        return self._http.get("/get_all_keys").text.split()

    def holds(self) -> tuple[int, int]:
        """(objects, bytes that they take)"""
        text = self._http.get("/metrics").text
        return tuple(int(re.search(rf"^{name} (\d+)", text, re.M)[1]) for name in ("master_key_count", _BYTES))


_BYTES = "master_allocated_bytes"


def markdown(header: list[str], rows: list[list]) -> str:
    """A table of people's numbers."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
