"""Processes must not outlive who started them, even when that one is killed outright (Linux only)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Loaded with the module, before any fork: between fork and exec as little as possible is done.
_prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform.startswith("linux") else None


def end_with(parent: int) -> None:
    """This process is killed when its parent ends, and ends now if that has happened already.

    parent: its process id, as it was when there was no doubt of its life. SIGKILL, because a rank that is only asked to stop
    may wait for a pack that nobody will send any more.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)
