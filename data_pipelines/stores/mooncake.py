"""The Mooncake store: features stay in the memory of the producer that computed them until a rank fetches them.

One copy, one hop, over TCP or RDMA. The master only knows which client holds which key. Mooncake is a cache, not a
queue, hence: objects are hard-pinned (unread ones would be evicted silently), keys are never reused (a put on an
existing key reports success and keeps the old bytes), and whoever reads an object also removes it (a remove under a
live reader is a torn read that is reported as success).

Mooncake's clients listen on all interfaces of their machine without authentication: run it on a network of your own.
A process with an open client must not fork (the child hangs); spawn instead.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import httpx
import numpy as np

from ..errors import UserError
from ..network import own_address
from .config import StoreConfig
from .libraries import find_master, library_path, load_libraries
from .store import Full, Missing, StoreError

__all__ = ["MooncakeStore", "find_master", "library_path", "master_command", "wait_ready"]

_MEANING = {
    -1: "the client could not be set up",
    -200: "no segment has room for the object, or it is larger than any segment",
    -600: "bad parameters, or a buffer that is smaller than the object",
    -704: "there is no such object",
    -706: "the object is leased to a reader",
    -707: "the read lease ended during the transfer",
    -800: "the transfer failed: the client that holds the object is gone",
    -801: "the store's own checksum does not match",
    -900: "the master does not answer",
    -901: "the master did not answer in time",
}
_CLOSE_SECONDS = 30.0  # beyond the time after which a read from a frozen peer ends


class MooncakeStore:
    """A client. A producer lends `segment_bytes` to the pool and puts into its own segment; a consumer lends nothing.

    Raises UserError when no master answers at `config.master`, the libraries are missing or the set-up fails.
    """

    def __init__(self, config: StoreConfig, *, role: Literal["producer", "consumer"]):
        host, port = _parse_master(config.master)
        _probe(host, port)
        self._close_seconds = config.transfer_timeout_seconds + _CLOSE_SECONDS
        library = _import_mooncake(config.transfer_timeout_seconds)
        self._client: Any = library.MooncakeDistributedStore()
        segment = config.segment_bytes if role == "producer" else 0
        code = self._client.setup(
            own_address(host, port), "P2PHANDSHAKE", segment, config.buffer_bytes, config.protocol, config.device,
            config.master,
        )  # fmt: skip
        if code != 0:
            self._client = None
            raise UserError(
                f"Mooncake's client could not be set up: {_describe(code)}",
                where=f"master {config.master}, protocol {config.protocol}, segment of {segment} bytes",
                fix="look into the log of mooncake_master; lower store.segment_bytes if memory is short",
            )
        self._placement = library.ReplicateConfig()
        self._placement.with_hard_pin = True
        if segment:
            self._placement.preferred_segment = self._client.get_hostname()
        self._local = threading.local()
        self._buffers: list[np.ndarray] = []
        self._idle = threading.Condition()
        self._calls = 0

    def put(self, key: str, payload: bytes | memoryview) -> None:
        with self._in_use() as client:
            buffer = self._buffer(client, len(payload))
            buffer[: len(payload)] = np.frombuffer(payload, dtype=np.uint8)
            [code] = client.batch_put_from_multi_buffers(
                [key], [[buffer.ctypes.data]], [[len(payload)]], self._placement
            )
        if code != 0:
            raise _error(code, f"put of {key} ({len(payload)} bytes)")

    def get(self, key: str, size: int) -> memoryview:
        with self._in_use() as client:
            buffer = self._buffer(client, size)
            got = client.get_into(key, buffer.ctypes.data, size)
            # A copy, because a transfer that was given up may still write into the buffer, which is never freed for that.
            payload = buffer[:size].copy().data if got == size else memoryview(b"")
        if got < 0:
            raise _error(got, f"get of {key} ({size} bytes)")
        if got != size:
            raise StoreError(f"object {key} has {got} bytes, not {size}")
        return payload

    def remove(self, key: str) -> None:
        with self._in_use() as client:
            [code] = client.batch_remove([key], True)
        if code not in (0, -704):
            raise _error(code, f"remove of {key}")

    def close(self) -> None:
        """Wait for the calls of other threads to return, then leave the pool. The client is never used afterwards."""
        with self._idle:
            client, self._client = self._client, None
            if client is None:
                return
            if not self._idle.wait_for(lambda: self._calls == 0, timeout=self._close_seconds):
                raise StoreError(
                    f"a call to Mooncake has not returned for {self._close_seconds:.0f} s; client left open"
                )
        for buffer in self._buffers:
            client.unregister_buffer(buffer.ctypes.data)
        client.close()

    @contextmanager
    def _in_use(self) -> Iterator[Any]:
        """The client, which stays open until the block is left. (Using a closed client crashes the interpreter.)"""
        with self._idle:
            if self._client is None:
                raise StoreError("the store is closed")
            client = self._client
            self._calls += 1
        try:
            yield client
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    def _buffer(self, client: Any, size: int) -> np.ndarray:
        """This thread's registered buffer, of at least `size` bytes. RDMA needs registered memory, TCP allows it."""
        buffer = getattr(self._local, "buffer", None)
        if buffer is not None and buffer.nbytes >= size:
            return buffer
        grown = np.empty(1 << max(16, (size - 1).bit_length()), dtype=np.uint8)
        code = client.register_buffer(grown.ctypes.data, grown.nbytes)
        if code != 0:
            raise _error(code, f"registration of a buffer of {grown.nbytes} bytes")
        with self._idle:
            if buffer is not None:
                client.unregister_buffer(buffer.ctypes.data)
                self._buffers = [kept for kept in self._buffers if kept is not buffer]
            self._buffers.append(grown)
        self._local.buffer = grown
        return grown


def master_command(host: str, port: int, metrics_port: int) -> list[str]:
    """The command line of a master that listens on `host` only. Give it library_path() in LD_LIBRARY_PATH.

    A lease of 0 would make every get fail with −707; 5 s is the time that a reader has to begin its transfer.
    """
    return [
        str(find_master()),
        f"--rpc_address={host}",
        f"--rpc_port={port}",
        f"--metrics_host={host}",
        f"--metrics_port={metrics_port}",
        "--default_kv_lease_ttl=5000",
        "--logtostderr=1",
    ]


def wait_ready(
    host: str, port: int, metrics_port: int, *, timeout: float = 30.0, process: subprocess.Popen | None = None
) -> None:
    """Return when the master serves. Raises UserError when it does not in `timeout` seconds, or `process` has ended."""
    deadline = time.monotonic() + timeout
    reason = "nothing answered"
    while time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            raise UserError(f"mooncake_master ended with status {process.returncode}", fix="read its log")
        try:
            socket.create_connection((host, port), timeout=1).close()
            answer = httpx.get(f"http://{host}:{metrics_port}/health", timeout=2, trust_env=False)
            if answer.status_code == 200:
                return
            reason = f"its health check says {answer.status_code}"
        except (OSError, httpx.HTTPError) as error:
            reason = str(error)
        time.sleep(0.05)
    raise UserError(f"mooncake_master is not ready after {timeout:.0f} s: {reason}", where=f"{host}:{port}")


def _import_mooncake(transfer_timeout_seconds: int) -> Any:
    os.environ["MC_TCP_STATUS_TIMEOUT_SEC"] = str(transfer_timeout_seconds)  # read when a client is made
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "2")  # the default blocks for 90 s
    load_libraries()
    try:
        from mooncake import store
    except ImportError as error:
        raise UserError(
            f"Mooncake cannot be imported: {error}", fix="make setup, or choose store=filesystem"
        ) from error
    return store


def _parse_master(master: str) -> tuple[str, int]:
    host, _, port = master.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"store.master={master!r} is not host:port", fix="name a running mooncake_master")
    return host, int(port)


def _probe(host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError as error:
        raise UserError(
            f"no mooncake_master answers: {error}",
            where=f"store.master={host}:{port}",
            fix="start mooncake_master first (draftsmith run does), or correct the address",
        ) from error


def _describe(code: int) -> str:
    return f"{_MEANING.get(code, 'no meaning known')} ({code})"


def _error(code: int, doing: str) -> StoreError:
    kind = {-704: Missing, -200: Full}.get(code, StoreError)
    return kind(f"{doing}: {_describe(code)}")
