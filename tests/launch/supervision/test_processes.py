"""The launcher's processes, with real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_pipelines.errors import UserError
from launch.supervision import processes
from launch.supervision.processes import Crew, Role, claim_port, cpu_seconds, end_hung, free_port

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def wait_for(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_helper_that_is_killed_is_started_again_and_counted(tmp_path: Path) -> None:
    crew = Crew(tmp_path, max_restarts=1)
    try:
        child = crew.start_helper(Role("producer-0", SLEEP))
        first = child.process.pid
        assert crew.tend() == []
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: child.status is not None)
        assert crew.tend() == ["producer-0 was ended by SIGKILL: restarted (1 of 1)"]
        assert child.process.pid != first and child.status is None
        os.kill(child.process.pid, signal.SIGKILL)
        wait_for(lambda: child.status is not None)
        with pytest.raises(UserError, match="producer-0 was ended by SIGKILL after 1 restart"):
            crew.tend()
    finally:
        crew.stop()


def test_an_error_for_people_is_passed_on_and_not_tried_again(tmp_path: Path) -> None:
    code = (
        "import sys; from data_pipelines.errors import UserError; from launch.cli import print_error;"
        "print('noise'); print_error(UserError('no such pack:\\n  attempt 1: dead', where='row 7', fix='take it out'));"
        "print('more noise', file=sys.stderr); sys.exit(2)"
    )
    crew = Crew(tmp_path, max_restarts=3)
    child = crew.start_helper(Role("producer-0", [sys.executable, "-c", code]))
    wait_for(lambda: child.status is not None)
    with pytest.raises(UserError) as caught:
        crew.tend()
    assert caught.value.what == "no such pack:\n  attempt 1: dead"
    assert caught.value.where.startswith("row 7; said by producer-0")
    assert caught.value.fix == "take it out"
    assert child.restarts == 0


def test_a_traceback_is_shown_by_its_end(tmp_path: Path) -> None:
    code = "def f(): raise ValueError('of the first rank')\nprint('x' * 5000)\nf()"
    crew = Crew(tmp_path, max_restarts=0)
    child = crew.start_trainer(Role("trainer", [sys.executable, "-c", code]))
    wait_for(lambda: child.status is not None)
    error = child.failure("the trainer exited with status 1")
    assert error.what.endswith("| ValueError: of the first rank")
    assert len(str(error).splitlines()) < 20


def failing(tmp_path: Path, code: str, restarts: int = 3):
    crew = Crew(tmp_path, max_restarts=restarts)
    child = crew.start_trainer(Role("trainer", [sys.executable, "-c", code]))
    wait_for(lambda: child.status is not None)
    return crew, child


def test_a_crash_is_tried_again_but_not_twice_at_the_same_step_with_the_same_words(tmp_path: Path) -> None:
    crew, child = failing(tmp_path, "raise ValueError('odd')")
    assert crew.revive(child, step=3) == "trainer exited with status 1: restarted (1 of 3)"
    wait_for(lambda: child.status is not None)
    assert "restarted (2 of 3)" in crew.revive(child, step=4)  # it came further
    wait_for(lambda: child.status is not None)
    with pytest.raises(UserError, match="twice at step 4 in the same way") as caught:
        crew.revive(child, step=4)
    assert caught.value.what.endswith("| ValueError: odd")
    assert crew.restarted["trainer"] == 2


def test_a_signal_says_nothing_about_the_program(tmp_path: Path) -> None:
    crew, child = failing(tmp_path, "import os; os.kill(os.getpid(), 9)")
    for count in (1, 2, 3):
        assert crew.revive(child, step=4) == f"trainer was ended by SIGKILL: restarted ({count} of 3)"
        wait_for(lambda: child.status is not None)
    with pytest.raises(UserError, match="SIGKILL after 3 restarts"):
        crew.revive(child, step=4)


def test_restarts_are_forgotten_after_a_healthy_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crew, child = failing(tmp_path, "import os; os.kill(os.getpid(), 9)", restarts=1)
    crew.revive(child)
    wait_for(lambda: child.status is not None)
    monkeypatch.setattr(processes, "HEALTHY_SECONDS", 0.0)
    assert "restarted (1 of 1)" in crew.revive(child)
    assert crew.restarted["trainer"] == 2


def test_who_hangs_is_ended_with_all_that_it_started_and_may_start_again(tmp_path: Path) -> None:
    """A stopped process obeys no signal but SIGKILL; its child is in a session of its own, as ranks are."""
    code = (
        f"import subprocess, time; p = subprocess.Popen({SLEEP!r}, start_new_session=True);"
        "print(p.pid, flush=True); time.sleep(60)"
    )
    crew = Crew(tmp_path, max_restarts=3)
    child = crew.start_trainer(Role("trainer", [sys.executable, "-c", code]))
    try:
        wait_for(lambda: child.said().strip() != "")
        grandchild, first = int(child.said()), child.process
        os.kill(first.pid, signal.SIGSTOP)
        end_hung(child, first, "rank 1 was silent for 61 s")
        wait_for(lambda: child.status is not None)
        wait_for(lambda: not alive(grandchild))
        said = "trainer was ended because rank 1 was silent for 61 s: restarted (1 of 3)"
        assert crew.revive(child, step=0) == said
        end_hung(child, first, "judged in its former life")
        assert child.status is None and child.hung == ""
    finally:
        crew.stop()


def test_stopping_ends_children_and_what_they_started(tmp_path: Path) -> None:
    """A child that ignores SIGTERM, with a grandchild in a session of its own: as torchrun and its ranks are."""
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"p = subprocess.Popen({SLEEP!r}, start_new_session=True); print(p.pid, flush=True); time.sleep(60)"
    )
    crew = Crew(tmp_path, max_restarts=0)
    child = crew.start_trainer(Role("trainer", [sys.executable, "-c", code]))
    wait_for(lambda: child.said().strip() != "")
    grandchild = int(child.said())
    assert alive(grandchild)
    crew.stop(grace=0.3)
    assert not alive(child.process.pid)
    wait_for(lambda: not alive(grandchild))


def test_servers_are_stopped_after_those_that_need_them(tmp_path: Path) -> None:
    """The client takes its time to say goodbye; the server must still be there."""
    code = (
        "import signal, sys, time\n"
        "def end(*_): time.sleep({delay}); open({path!r}, 'a').write('{name} '); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); print('ready', flush=True); time.sleep(60)"
    )
    order = str(tmp_path / "order")
    crew = Crew(tmp_path, max_restarts=0)
    for name, delay, server in (("server", 0, True), ("client", 0.4, False)):
        command = [sys.executable, "-c", code.format(delay=delay, path=order, name=name)]
        crew.start_helper(Role(name, command, server=server))
    wait_for(lambda: all("ready" in child.said() for child in crew.children))
    crew.stop()
    assert Path(order).read_text().split() == ["client", "server"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's death signal is Linux's")
def test_children_end_when_the_launcher_is_killed(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from launch.supervision.processes import Crew, Role; import time\n"
        f"crew = Crew(Path({str(tmp_path)!r}), 0); child = crew.start_helper(Role('helper', {SLEEP!r}))\n"
        "print(child.process.pid, flush=True); time.sleep(60)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(launcher.stdout.readline())
    assert alive(child)
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not alive(child))


def test_a_port_in_use_is_named_with_its_key() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is in use") as caught:
            claim_port("cluster.ledger_port", "127.0.0.1", port)
        assert caught.value.where == "cluster.ledger_port on 127.0.0.1"
    assert claim_port("cluster.ledger_port", "127.0.0.1", port) == port
    assert free_port("127.0.0.1") > 0


def test_processor_time_of_whoever_is_there() -> None:
    before = cpu_seconds([os.getpid(), 2**22 + 1])
    while cpu_seconds([os.getpid()]) < before + 0.05:
        sum(range(10_000))
    assert cpu_seconds([2**22 + 1]) == 0.0


@pytest.mark.parametrize("how", ["-m", "torchrun"])
def test_a_persons_own_files_are_not_taken_for_ours(tmp_path: Path, monkeypatch, how: str) -> None:
    """Every Sphinx project has a conf.py; a run is started from wherever the person works."""
    ours = ("conf", "data_pipelines", "launch", "recipes", "trainer")
    for name in ours:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the person was imported')")
    (tmp_path / "look.py").write_text(
        f"import {', '.join(ours)}\nprint('found', *({', '.join(f'{n}.__path__' for n in ours)}))"
    )
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "look"]
    if how == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", *command]
    root = Path(processes.__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "look.py").rename(tmp_path / "elsewhere" / "look.py")
    crew = Crew(tmp_path / "logs", 0)
    try:
        child = crew.start_helper(Role("look", command))
        wait_for(lambda: child.status is not None, 60)
        assert child.status == 0 and f"found ['{root}/conf']" in child.said(), child.said()
    finally:
        crew.stop()
