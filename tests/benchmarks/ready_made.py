"""A producer whose features cost nothing: everything but the target is real.

python -m tests.benchmarks.ready_made <ledger's url> <token file> <name> <seconds that a pack takes>
"""

from __future__ import annotations

import sys
import time

import torch

from data_pipelines.features import Features
from data_pipelines.logs import configure_logging
from data_pipelines.stream import producer
from data_pipelines.stream.messages import read_token

MOST_TOKENS = 8192


class ReadyMade:
    """An engine that hands out the first rows of what it made once."""

    def __init__(self, spec, seconds: float):
        self._seconds = seconds
        made = torch.randn(MOST_TOKENS, len(spec.taps) + 1, spec.hidden_size).to(getattr(torch, spec.dtype))
        self._taps, self._final = made[:, :-1].contiguous(), made[:, -1].contiguous()

    def compute(self, input_ids, lengths) -> Features:
        if self._seconds:
            time.sleep(self._seconds)
        return Features(self._taps[: len(input_ids)], self._final[: len(input_ids)])


if __name__ == "__main__":
    url, token_file, name, seconds = sys.argv[1:]
    configure_logging(name)
    producer._build_engine = lambda config, spec: ReadyMade(spec, float(seconds))
    producer.run_producer(url, read_token(token_file), name)
