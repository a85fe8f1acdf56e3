"""What every store does, and what only one of them does. Mooncake runs for real, between processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from data_pipelines.errors import UserError
from data_pipelines.stores import Full, Missing, StoreError, build_store, libraries
from data_pipelines.stores.config import StoreConfig
from data_pipelines.stores.filesystem import FilesystemStore, sweep_temporaries

MIB = 1024**2


@pytest.fixture
def configs(master, tmp_path):
    return {
        "mooncake": StoreConfig("mooncake", master=master.address, segment_bytes=64 * MIB, buffer_bytes=16 * MIB),
        "filesystem": StoreConfig("filesystem", path=str(tmp_path / "store")),
        "memory": StoreConfig("memory", path=str(tmp_path), segment_bytes=64 * MIB),
    }


@pytest.fixture(params=["mooncake", "filesystem", "memory"])
def pair(request, configs):
    """(a producer's, a consumer's client of the same store)"""
    config = configs[request.param]
    producer, consumer = build_store(config, role="producer"), build_store(config, role="consumer")
    yield producer, consumer
    consumer.close()
    producer.close()


def test_bytes_come_out_as_they_went_in(pair):
    producer, consumer = pair
    for number, size in enumerate([1, 4097, 3 * MIB + 1, 100]):
        payload = os.urandom(size)
        producer.put(f"key{number}", payload)
        assert consumer.get(f"key{number}", size) == payload
        consumer.remove(f"key{number}")
        with pytest.raises(Missing):
            consumer.get(f"key{number}", size)


def test_removing_what_is_not_there_is_no_error(pair):
    pair[1].remove("never-put")


def test_another_size_than_announced_is_an_error(pair):
    producer, consumer = pair
    producer.put("sized", bytes(1000))
    for size in (999, 1001):
        with pytest.raises(StoreError) as error:
            consumer.get("sized", size)
        assert not isinstance(error.value, Missing)
    consumer.remove("sized")


def test_a_closed_store_refuses_and_may_be_closed_again(pair):
    for store in pair:
        store.close()
        store.close()
        for use in (lambda s: s.put("k", b"x"), lambda s: s.get("k", 1), lambda s: s.remove("k")):
            with pytest.raises(StoreError, match="closed"):
                use(store)


def test_one_client_serves_several_threads(pair):
    producer, consumer = pair
    wrong = []

    def work(number: int) -> None:
        for step in range(10):
            key, payload = f"t{number}-{step}", bytes([number]) * (50_000 + step)
            producer.put(key, payload)
            if consumer.get(key, len(payload)) != payload:
                wrong.append(key)
            consumer.remove(key)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong and not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("name", ["mooncake", "memory"])
def test_a_full_store_says_so_and_has_room_again_after_a_remove(configs, name):
    store = build_store(configs[name], role="producer")
    payload = bytes(20 * MIB)
    kept = []
    with pytest.raises(Full):
        for number in range(10):
            store.put(f"big{number}", payload)
            kept.append(f"big{number}")
    assert 1 <= len(kept) <= 3
    with pytest.raises(Full):
        store.put("larger-than-the-segment", bytes(65 * MIB))
    store.remove(kept[0])
    store.put("after", payload)
    for key in [*kept[1:], "after"]:
        store.remove(key)
    store.close()


def test_mooncake_keeps_the_old_bytes_of_an_existing_key(configs, master):
    """The trap that keys made of lease ids avoid: the put reports success."""
    store = build_store(configs["mooncake"], role="producer")
    store.put("twice", b"old")
    store.put("twice", b"new")
    assert store.get("twice", 3) == b"old"
    assert "twice" in master.objects()
    store.remove("twice")
    assert "twice" not in master.objects()
    store.close()


@pytest.mark.parametrize("name", ["filesystem", "memory"])
def test_the_other_stores_refuse_an_existing_key(configs, name):
    store = build_store(configs[name], role="producer")
    store.put("twice", b"old")
    with pytest.raises(StoreError, match="never used twice"):
        store.put("twice", b"new")
    assert store.get("twice", 3) == b"old"
    store.close()


_PRODUCER = """
import sys, time
from data_pipelines.stores import build_store
from data_pipelines.stores.config import StoreConfig
store = build_store(StoreConfig("mooncake", master=sys.argv[1], segment_bytes=64 * 1024**2), role="producer")
for number in range(3):
    store.put(f"{sys.argv[2]}{number}", bytes([number]) * 1_000_000)
print("ready", flush=True)
sys.stdin.read()
store.close()
"""


def _start_producer(master, prefix: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", _PRODUCER, master.address, prefix],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline().strip() == "ready"
    return process


def test_mooncake_between_processes_and_what_a_clean_end_takes_along(configs, master):
    process = _start_producer(master, "clean")
    consumer = build_store(configs["mooncake"], role="consumer")
    try:
        for number in range(2):
            assert consumer.get(f"clean{number}", 1_000_000) == bytes([number]) * 1_000_000
            consumer.remove(f"clean{number}")
        assert [key for key in master.objects() if key.startswith("clean")] == ["clean2"]
        process.communicate(timeout=300)
        assert process.returncode == 0
        with pytest.raises(StoreError):
            consumer.get("clean2", 1_000_000)
    finally:
        process.kill()
        process.communicate()
        consumer.close()


def test_the_objects_of_a_killed_mooncake_producer_give_an_error_at_once(configs, master):
    process = _start_producer(master, "killed")
    consumer = build_store(configs["mooncake"], role="consumer")
    try:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=300)
        began = time.monotonic()
        with pytest.raises(StoreError):
            consumer.get("killed0", 1_000_000)
        assert time.monotonic() - began < 10
    finally:
        process.kill()
        process.communicate()
        consumer.close()


def test_no_master_is_a_message_and_not_a_hang():
    began = time.monotonic()
    with pytest.raises(UserError, match="no mooncake_master answers"):
        build_store(StoreConfig("mooncake", master="127.0.0.1:9"), role="consumer")
    assert time.monotonic() - began < 6
    with pytest.raises(UserError, match="host:port"):
        build_store(StoreConfig("mooncake", master="nowhere"), role="consumer")


def test_missing_libraries_are_named_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(libraries, "REQUIRED", ("libibverbs.so.1", "libno-such-thing.so.7"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert libraries.library_path() == ""
    with pytest.raises(UserError, match=r"libno-such-thing\.so\.7") as error:
        libraries.load_libraries()
    assert "apt-get install" in error.value.fix and "make setup" in error.value.fix


def test_unpacked_libraries_are_found_and_loaded(monkeypatch, tmp_path):
    """A library of this machine under another name stands for one that only `<venv>/syslibs` has."""
    folder = tmp_path / "syslibs" / "usr" / "lib" / f"{os.uname().machine}-linux-gnu"
    folder.mkdir(parents=True)
    source, library = tmp_path / "unpacked.c", folder / "libdraftsmith-test.so.1"
    source.write_text("int draftsmith_test(void) { return 1; }\n")
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library), str(source)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no C compiler to make a library with")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(libraries, "REQUIRED", (library.name,))
    assert libraries.library_path() == str(folder)
    libraries.load_libraries()


def test_a_killed_writer_leaves_nothing_that_looks_like_an_object(tmp_path):
    script = (
        "import os, sys\n"
        "from data_pipelines.stores.filesystem import FilesystemStore\n"
        "os.fsync = lambda fd: os.kill(os.getpid(), 9)\n"
        "FilesystemStore(sys.argv[1]).put('key', b'x' * 100000)\n"
    )
    finished = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=300)
    assert finished.returncode == -signal.SIGKILL
    store = FilesystemStore(str(tmp_path))
    with pytest.raises(Missing):
        store.get("key", 100000)
    assert len(list(tmp_path.iterdir())) == 1, "what the killed writer left, too young to be swept"
    sweep_temporaries(tmp_path, older_than_seconds=-1)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_full(tmp_path, monkeypatch):
    store = FilesystemStore(str(tmp_path))

    def no_room(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(Full, match="No space"):
        store.put("key", b"x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["", "../escape", "a/b", ".hidden"])
def test_keys_that_are_no_file_names_are_refused(tmp_path, key):
    with pytest.raises(StoreError, match="file name"):
        FilesystemStore(str(tmp_path)).put(key, b"x")
