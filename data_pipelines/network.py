"""Addresses of this machine."""

from __future__ import annotations

import socket


def own_address(peer: str, port: int = 1) -> str:
    """The address of this machine on the network that leads to `peer`: others on that network reach us there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, port))  # sends nothing
        return probe.getsockname()[0]
