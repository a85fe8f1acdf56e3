"""Two machines on one: what several nodes do together, without several nodes.

Each has a network, a host name, processes, shared memory and a table of hosts of its own; they share the file system, as
the nodes of a cluster do. Between them lies a `Link`, with a rate and a delay, that can be cut and healed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
DEVICE, MTU = "eth0", 9000
_SPACES = ["--net", "--uts", "--mount", "--pid"]
_UNSHARE = ["unshare", *_SPACES, "--fork", "--mount-proc", "--kill-child"]
_SETUP = """
hostname {name}
mount --bind {hosts} /etc/hosts
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
echo up
exec cat
"""


class Machine:
    """Namespaces that end, with every process in them, by `lose()`, or when this process does.

    Its host name leads to 127.0.1.1, as Debian's installer writes it, and no other machine's name leads anywhere: what
    works here needs addresses only.
    """

    def __init__(self, name: str, address: str, folder: Path):
        self.name, self.address = name, address
        hosts = folder / f"{name}.hosts"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        script = _SETUP.format(name=name, hosts=hosts)
        self._holder = subprocess.Popen([*_UNSHARE, "sh", "-ec", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout.readline() == b"up\n"
        self.pid = psutil.Process(self._holder.pid).children()[0].pid

    def plug(self, device: str) -> None:
        """A device of the machine that the tests run on becomes this one's."""
        run("ip", "link", "set", device, "netns", str(self.pid))
        for command in (
            ["link", "set", device, "name", DEVICE, "mtu", str(MTU)],
            ["addr", "add", f"{self.address}/24", "dev", DEVICE],
            ["link", "set", DEVICE, "up"],
        ):
            run(*self.inside("ip", *command))

    def inside(self, *command: str) -> list[str]:
        """The command that runs another one on this machine, in the project's folder."""
        return ["nsenter", "--target", str(self.pid), *_SPACES, f"--wdns={ROOT}", "--", *command]

    def processes(self, *words: str) -> list[psutil.Process]:
        """Those that run on this machine and whose command line holds all these words."""
        home, found = os.readlink(f"/proc/{self.pid}/ns/pid"), []
        for process in psutil.process_iter():
            try:
                if os.readlink(f"/proc/{process.pid}/ns/pid") != home:
                    continue
                if all(word in " ".join(process.cmdline()) for word in words):
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def lose(self) -> None:
        """The machine is gone, with all that ran on it and its end of the link: nobody is told."""
        self._holder.kill()
        self._holder.wait()
        for pipe in (self._holder.stdin, self._holder.stdout):
            pipe.close()
        # nsenter stops itself when what it carries is stopped, and then does not see it end.
        for process in psutil.process_iter(["cmdline"]):
            if (process.info["cmdline"] or [])[:3] == self.inside()[:3]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


class Link:
    """rate: bytes a second in each direction, 0 for any; delay: seconds that each packet is under way.

    A process of its own moves the packets, see `link.py`.
    """

    def __init__(self, *machines: Machine, rate: float = 0.0, delay: float = 0.0):
        self.devices = [f"ds{os.getpid() % 10**6}-{end}" for end in "ab"]
        command = [sys.executable, "-m", "tests.machines.link", *self.devices]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
        self.set(rate=rate, delay=delay)
        for machine, device in zip(machines, self.devices, strict=True):
            machine.plug(device)

    def set(self, **settings) -> dict:
        """rate, delay, cut. Returns what there is to count: bytes [from the first, from the second], dropped packets."""
        self._process.stdin.write(json.dumps(settings) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def cut(self) -> None:
        """Nobody is told: packets only stop arriving."""
        self.set(cut=True)

    def heal(self) -> None:
        self.set(cut=False)

    def bytes(self) -> list[int]:
        """Sent by the first machine, by the second, and arrived; headers included."""
        return self.set()["bytes"]

    def close(self) -> None:
        self._process.communicate()  # ends at the end of its input


@contextmanager
def two_machines(folder: Path, *, rate: float = 0.0, delay: float = 0.0) -> Iterator[tuple[Machine, Machine, Link]]:
    """`node-a` (10.0.0.1) and `node-b` (10.0.0.2), and the link between them. Nothing of them is left afterwards."""
    need_machines()
    machines, link = [], None
    try:
        for number, name in enumerate(("node-a", "node-b"), 1):
            machines.append(Machine(name, f"10.0.0.{number}", folder))
        link = Link(*machines, rate=rate, delay=delay)
        yield *machines, link
    finally:
        for machine in machines:
            machine.lose()
        if link is not None:
            link.close()


def need_machines() -> None:
    """Skips the test, and says why, where no machines can be made."""
    if not shutil.which("ip"):
        subprocess.run(["apt-get", "install", "-y", "--no-install-recommends", "iproute2"], capture_output=True)
    reason, missing = "", [tool for tool in ("ip", "unshare", "nsenter") if not shutil.which(tool)]
    if missing:
        reason = f"no {missing[0]} command"
    elif not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        reason = "no access to /dev/net/tun"
    else:
        reason = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True).stderr.strip()
    if reason:
        pytest.skip(f"NOT TESTED: several machines ({reason}; it needs root, iproute2, util-linux and TUN devices)")


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
