"""A rank in a process of its own, for tests that put it where they are not: reads packs again and again, prints digests.

One line for each pack: `<index> <digest of its features>`. Ends after the round in which its standard input was closed.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from pathlib import Path

import xxhash

from data_pipelines.engines import TargetConfig, resolve_target
from data_pipelines.features import Features, FeatureSpec
from data_pipelines.stores.config import StoreConfig
from data_pipelines.stream.consumer import Prefetcher

from .conftest import Reachable, make_packs, stream_source

PACKS = 10  # of a round


class Ledger(Reachable):
    def __init__(self, url: str):
        self.url = url


def digest(features: Features) -> str:
    hashed = xxhash.xxh3_64(features.taps.numpy())
    hashed.update(features.final.numpy())
    return hashed.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ledger", required=True)
    parser.add_argument("--config", required=True, type=Path, help="JSON: {store, spec}")
    options = parser.parse_args()
    config = json.loads(options.config.read_text())
    spec = FeatureSpec(**{**config["spec"], "taps": tuple(config["spec"]["taps"])})
    packs = make_packs(resolve_target(TargetConfig(kind="tiny")).config.vocab_size)[:PACKS]
    told = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), told.set()), daemon=True).start()

    def rounds():
        number, last = 0, False
        while not last:
            last = told.is_set()
            for pack in packs:
                yield number, pack
                number += 1

    with stream_source(Ledger(options.ledger), StoreConfig(**config["store"]), spec) as source:
        prefetcher = Prefetcher(source, rounds(), depth=4)
        for index, _, features in prefetcher:
            print(index, digest(features), flush=True)
        prefetcher.close()


if __name__ == "__main__":
    main()
