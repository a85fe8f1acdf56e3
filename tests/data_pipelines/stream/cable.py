"""A network between a caller and a server that can be cut: a TCP proxy on the loopback."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading


class Cable:
    """Forwards connections to `host:port`; its own address is `url`.

    cut(reset=True): open connections are reset and new ones refused, as by a host that is up without its service.
    cut(reset=False): everything sent is swallowed without a word, as by a pulled plug. heal(): new connections pass.
    """

    def __init__(self, url: str):
        host, port = url.removeprefix("http://").split(":")
        self._server = (host, int(port))
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._whole, self._closed = True, False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, *, reset: bool) -> None:
        with self._lock:
            self._whole = False
            self._reset_new = reset
        if reset:
            self._end_all()

    def heal(self) -> None:
        """What was swallowed is lost, as are its connections."""
        self._end_all()
        with self._lock:
            self._whole = True

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._end_all()

    def _accept(self) -> None:
        while not self._closed:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                whole, reset = self._whole, not self._whole and self._reset_new
            if reset:
                _reset(caller)
                continue
            try:  # on a silent cut the connection stands, as one behind a dead link would seem to
                server = socket.create_connection(self._server) if whole else socket.socket()
            except OSError:
                _reset(caller)
                continue
            for end in (caller, server):  # what is forwarded in two pieces arrives as fast as without a cable
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.append((caller, server))
            for source, sink in ((caller, server), (server, caller)) if whole else ((caller, server),):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self._whole:
                    sink.sendall(data)
            if self._whole:
                sink.shutdown(socket.SHUT_WR)

    def _end_all(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                _reset(end)


def _reset(connection: socket.socket) -> None:
    """Close with RST. (A reader in another thread is woken by the shutdown.)"""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
