"""A real producer with a target that takes `--delay` seconds more for each pack; its other options are the producer's."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from data_pipelines.stream import producer


class SlowEngine:
    def __init__(self, engine: Any, delay: float):
        self._engine, self._delay = engine, delay

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def compute(self, *arguments: Any, **named: Any) -> Any:
        time.sleep(self._delay)
        return self._engine.compute(*arguments, **named)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, required=True)
    options, others = parser.parse_known_args()
    build = producer.build_engine
    producer.build_engine = lambda *arguments: SlowEngine(build(*arguments), options.delay)
    sys.argv = [sys.argv[0], *others]
    producer.main()
