"""An ASGI application behind a real socket, served by a thread of this process because that starts in no time."""

from __future__ import annotations

import socket
import threading
from typing import Any

import uvicorn


class Served:
    """Stopped and started again, it keeps its port. `address`: http://host:port."""

    def __init__(self, app: Any, port: int = 0):
        self._app, self.port = app, port
        self.start()

    def start(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as the real ledger does
        self.port = self._listener.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self._server = uvicorn.Server(uvicorn.Config(self._app, log_level="critical", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)
        self._listener.close()
        assert not self._thread.is_alive()
