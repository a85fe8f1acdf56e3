"""A real Mooncake master for the tests of stores and stream."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from data_pipelines.stores.mooncake import library_path, master_command, wait_ready


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Master:
    """A mooncake_master that can be killed and started again on its port."""

    def __init__(self, log: Path):
        self._port, self.metrics_port, self._log = free_port(), free_port(), log
        self.address = f"127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        found = ":".join(filter(None, [library_path(), os.environ.get("LD_LIBRARY_PATH")]))
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                master_command("127.0.0.1", self._port, self.metrics_port),
                stdout=log,
                stderr=log,
                env={**os.environ, "LD_LIBRARY_PATH": found},
            )
        try:
            wait_ready("127.0.0.1", self._port, self.metrics_port, process=self._process)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def objects(self) -> list[str]:
        """The keys of all objects in the store."""
        answer = httpx.get(f"http://127.0.0.1:{self.metrics_port}/get_all_keys", trust_env=False)
        return answer.text.split()


@pytest.fixture(scope="session")
def master(tmp_path_factory) -> Iterator[Master]:
    started = Master(tmp_path_factory.mktemp("mooncake") / "master.log")
    yield started
    started.kill()


@pytest.fixture
def own_master(tmp_path) -> Iterator[Master]:
    """A master that the test may kill."""
    started = Master(tmp_path / "master.log")
    yield started
    started.kill()
