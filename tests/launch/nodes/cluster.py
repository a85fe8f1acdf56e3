"""A run on two machines, by the commands of docs/cluster.md: read from there, so that the page cannot go stale."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from data_pipelines.stores.mooncake import find_master, library_path
from tests.data_pipelines.stream.conftest import wait_until
from tests.machines import ROOT, Link, Machine

PAGE = ROOT / "docs" / "cluster.md"


def documented() -> dict[str, str]:
    """The page's shell blocks by their titles: what stands on the first line before a comma or colon."""
    blocks = re.findall(r"^```sh\n# ([^,:\n]+).*\n((?:.*\n)*?)```", PAGE.read_text(), re.MULTILINE)
    return dict(blocks)


class Role:
    """A running command, and all that it said."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]):
        self._log = log
        with log.open("w") as out:
            options = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT, "env": environment}
            self.process = subprocess.Popen(command, **options)

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def wait_for(self, condition: Callable[[], object], seconds: float = 240.0) -> None:
        wait_until(condition, seconds, lambda: self.runs)

    def ends_well(self, seconds: float = 240.0) -> None:
        assert self.process.wait(seconds) == 0, self.said()[-4000:]


class Cluster:
    """The store's master and the ledger on the first of two machines, a producer on each. Trainers come and go."""

    def __init__(self, folder: Path, machines: tuple[Machine, ...], link: Link, recipe: list[str]):
        self.folder, self.machines, self.link = folder, machines, link
        self.run_dir = folder / "run"
        self._blocks, self._recipe = documented(), shlex.join(recipe)
        self._environment = _with_commands(folder / "bin")
        head = machines[0]
        store = self.start(head, "the store")
        answers = head.inside("bash", "-c", f"exec 3<>/dev/tcp/{head.address}/50051")
        store.wait_for(lambda: subprocess.run(answers, capture_output=True).returncode == 0)
        ledger = self.start(head, "the ledger")
        ledger.wait_for((self.run_dir / "ledger.json").exists)
        self.producers = self.start_producers()

    def start(self, machine: Machine, title: str, **changes: str) -> Role:
        """One of the page's commands on a machine; what it leaves to its reader is filled in, `changes` on top."""
        script = self._blocks["every shell"] + self._blocks[title]
        told = {"/shared/big": str(self.run_dir), "my_recipe.yaml": self._recipe}
        for words, others in {**told, "--nproc-per-node 8": "--nproc-per-node 1", **changes}.items():
            script = script.replace(words, others)
        log = self.folder / f"{machine.name} {title}.log"
        return Role(machine.inside("bash", "-ec", script), log, self._environment)

    def start_producers(self) -> list[Role]:
        return [self.start(machine, "producers") for machine in self.machines]

    def start_trainers(self, **changes: str) -> list[Role]:
        titles = ("the first trainer node", "the other trainer nodes")
        return [self.start(machine, title, **changes) for machine, title in zip(self.machines, titles, strict=True)]


def ranks(machine: Machine) -> list[psutil.Process]:
    return [p for p in machine.processes("trainer.train") if "torch.distributed.run" not in p.cmdline()]


def _with_commands(folder: Path) -> dict[str, str]:
    """An environment that has the commands of an installed project, whether it is installed or not."""
    folder.mkdir()
    commands = {
        "draftsmith": f"{sys.executable} -m launch.cli",
        "torchrun": f"{sys.executable} -m torch.distributed.run",
        "mooncake_master": str(find_master()),
    }
    for name, command in commands.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / name).chmod(0o755)
    libraries = ":".join(filter(None, [library_path(), os.environ.get("LD_LIBRARY_PATH")]))
    path = f"{folder}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "LD_LIBRARY_PATH": libraries, "OMP_NUM_THREADS": "1"}
