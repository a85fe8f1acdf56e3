"""The link does what it is set to, as far as physics goes: never faster, and nothing through a cut one."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from . import Link, Machine, need_machines, two_machines

RATE, DELAY, SENT = 20e6, 0.02, 8_000_000
_ECHO = """
import socket
server = socket.create_server(("", 5000))
print("listens", flush=True)
while True:
    caller, _ = server.accept()
    with caller:
        while data := caller.recv(1 << 20):
            caller.sendall(data[:1])
"""
_CALL = """
import socket, time
server = socket.create_connection(("10.0.0.1", 5000))
for size in (1, 1, 1):
    began = time.monotonic()
    server.sendall(b"x")
    server.recv(1)
    print(time.monotonic() - began)
"""
_SEND = f"""
import socket, time
server = socket.create_connection(("10.0.0.1", 5000))
began = time.monotonic()
server.sendall(bytes({SENT}))
server.shutdown(socket.SHUT_WR)
while server.recv(1 << 20):
    pass
print(time.monotonic() - began)
"""


@pytest.fixture(scope="module")
def laid(tmp_path_factory) -> Iterator[tuple[Machine, Machine, Link]]:
    with two_machines(tmp_path_factory.mktemp("machines"), rate=RATE, delay=DELAY) as (a, b, link):
        server = subprocess.Popen(a.inside(sys.executable, "-c", _ECHO), stdout=subprocess.PIPE)
        assert server.stdout.readline() == b"listens\n"
        yield a, b, link


def seconds(machine: Machine, program: str) -> list[float]:
    called = subprocess.run(machine.inside(sys.executable, "-c", program), capture_output=True, text=True, timeout=60)
    assert called.returncode == 0, called.stderr
    return [float(line) for line in called.stdout.split()]


def test_what_is_asked_over_the_link_is_answered_after_twice_its_delay(laid) -> None:
    _, b, _ = laid
    assert min(seconds(b, _CALL)) >= 2 * DELAY


def test_the_link_carries_its_rate_and_counts_what_it_carries(laid) -> None:
    _, b, link = laid
    before = link.bytes()
    [took] = seconds(b, _SEND)
    assert SENT / took <= RATE
    back, there = (after - earlier for after, earlier in zip(link.bytes(), before))
    assert SENT <= there <= 1.1 * SENT and back < there / 2


def test_nothing_passes_while_it_is_cut_and_what_was_lost_is_sent_again(laid) -> None:
    _, b, link = laid
    link.cut()
    caller = subprocess.Popen(b.inside(sys.executable, "-c", _CALL), stdout=subprocess.PIPE, text=True)
    before = link.bytes()
    time.sleep(1.5)
    assert link.bytes() == before and caller.poll() is None
    link.heal()
    answered, _ = caller.communicate(timeout=60)
    assert len(answered.split()) == 3


def test_a_machine_is_lost_with_all_that_runs_on_it(tmp_path) -> None:
    need_machines()
    machine = Machine("node-c", "10.0.0.3", tmp_path)
    process = subprocess.Popen(machine.inside("sh", "-c", "sleep 600 & echo up; wait"), stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"up\n" and len(machine.processes("sleep")) == 2
    machine.lose()
    assert process.wait(30) != 0
