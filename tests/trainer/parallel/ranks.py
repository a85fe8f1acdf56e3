"""Ranks of a test: forked from a server that has imported everything once, so that a group costs a second."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.distributed import TCPStore

from trainer.parallel import process_group

with suppress(ImportError):
    import deepspeed  # noqa: F401  (takes seconds, and is then there in every fork)

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload([__name__])
_SECONDS = 240


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What function(world, *arguments) returns on each of `size` ranks of one process group."""
    return forked(size, _in_group, function, *arguments)


def forked(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What function(*arguments) returns in each of `size` processes, which have torchrun's environment. An error in one is
    an error here, with its traceback."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # ours, as torchrun's: its port is free
    ends, ranks = [], []
    for rank in range(size):
        mine, theirs = _SERVER.Pipe(duplex=False)
        process = _SERVER.Process(target=_rank, args=(theirs, rank, size, store.port, function, arguments), daemon=True)
        process.start()
        theirs.close()
        ends.append(mine)
        ranks.append(process)
    waiting, results = dict(zip(ends, range(size))), {}
    try:
        while waiting:
            ready = wait(list(waiting), _SECONDS)
            assert ready, f"ranks {sorted(waiting.values())} of {size} are silent for {_SECONDS} s"
            for end in ready:
                rank = waiting.pop(end)
                done, results[rank] = end.recv()
                assert done, f"rank {rank} of {size}:\n{results[rank]}"
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [results[rank] for rank in range(size)]


def _rank(end, rank: int, size: int, port: int, function, arguments) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0",
    )  # fmt: skip
    try:
        end.send((True, function(*arguments)))
    except BaseException:
        end.send((False, traceback.format_exc()))
    os._exit(0)


def _in_group(function, *arguments):
    with process_group(60) as world:
        return function(world, *arguments)
