"""A producer: lease a pack, let the target compute it, put the features into the store, report them; again and again.

It needs the ledger's address and token and nothing else: no data set, no shared folder, no configuration. It may be
killed at any time; its leases then expire and others do its work.

By hand: `python -m data_pipelines.stream.producer --help`.
"""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..engines import build_engine
from ..engines.targets import TargetConfig, resolve_target
from ..errors import UserError
from ..features import FeatureSpec, encode, read_metadata
from ..stores import Full, Store, StoreError, build_store
from .client import LedgerClient
from .ledger import Lease, object_key
from .messages import ProducerConfig, read_token

log = logging.getLogger(__name__)

_LEASE_MARGIN = 0.9  # the part of a lease in which a put is tried: a later one would be refused
_PUT_PAUSE_SECONDS = 0.2
_RECONCILE_EVERY = 64  # stored packs


def run_producer(url: str, token: str, name: str, *, patience: float = 120.0) -> None:
    """Serve the ledger at `url` until it says that the run is finished, or SIGTERM or SIGINT; then return.

    name: for logs and the status page. patience: seconds for which an unreachable ledger is called again.
    Raises UserError when the target here is not the one that the trainer wants, StreamError when the ledger stays away.
    """
    client = LedgerClient(url, token, patience=patience)
    with _stopping_on_signals(client.stop):
        try:
            message = client.config()
            config, instance = ProducerConfig.from_json(message), client.instance
            spec = FeatureSpec(**config.spec)
            if config.threads:
                torch.set_num_threads(config.threads)
            engine = _build_engine(config, spec)
            store = build_store(config.store, role="producer")
            try:
                producer = Producer(f"{name}-{uuid.uuid4().hex[:6]}", client, store, spec, engine, instance)
                producer.message = _without_instance(message)
                producer.serve()
            finally:
                store.close()
        except UserError:
            if not client.stop.is_set():
                raise
        finally:
            client.close()


class Producer:
    """The loop of one producer. `client.stop` ends it after the current pack."""

    def __init__(
        self, name: str, client: LedgerClient, store: Store, spec: FeatureSpec, engine: Any, instance: str = ""
    ):
        self.name, self.message = name, None
        self._client, self._store, self._spec, self._engine = client, store, spec, engine
        self._instance = instance
        self._held: list[str] = []  # keys of own objects that nobody has told us are gone
        self._stored = 0

    def serve(self) -> None:
        log.info("%s serves %s (features %s)", self.name, self._client.url, self._spec.fingerprint)
        while not self._client.stop.is_set():
            lease, finished = self._client.lease(self.name, self._spec.fingerprint)
            if finished:
                break
            if self._client.instance != self._instance:
                self._meet_new_ledger()
            if lease is not None:
                self._work(lease)
        log.info("%s ends after %d packs", self.name, self._stored)

    def _work(self, lease: Lease) -> None:
        """One pack. Whatever goes wrong with it is reported to the ledger; the producer goes on with the next."""
        began = time.monotonic()
        deadline = began + _LEASE_MARGIN * lease.seconds
        key = object_key(lease.pack, lease.lease)
        log.info("leased pack %d (%s, %d tokens)", lease.index, lease.pack, len(lease.input_ids))
        try:
            payload = self._compute(lease)
            self._put(key, payload, deadline)
        except Exception as error:
            log.exception("pack %d failed", lease.index)
            self._client.failed(self.name, lease.want, lease.lease, f"{type(error).__name__}: {error}")
            return
        size, checksum = len(payload), read_metadata(payload)["checksum"]
        if self._client.stored(self.name, lease.want, lease.lease, size, checksum):
            self._stored += 1
            log.info("stored pack %d: %d bytes in %.2f s", lease.index, size, time.monotonic() - began)
            if len(self._held) >= _RECONCILE_EVERY:
                self._reconcile()
        else:
            log.warning("pack %d came too late or is not wanted any more; its object is removed", lease.index)
            self._drop([key])

    def _compute(self, lease: Lease) -> bytes:
        input_ids = np.asarray(lease.input_ids, dtype=np.int32)
        features = self._engine.compute(input_ids, tuple(lease.lengths))
        return encode(features, pack=lease.pack, input_ids=input_ids, lengths=lease.lengths, spec=self._spec)

    def _put(self, key: str, payload: bytes, deadline: float) -> None:
        """Put until it succeeds: a full store empties, a restarted master comes back. Gives up at the deadline."""
        self._held.append(key)
        warned = False
        while True:
            try:
                self._store.put(key, payload)
                return
            except StoreError as error:
                if not warned:
                    log.warning("%s; trying again", error)
                    warned = True
                if time.monotonic() + _PUT_PAUSE_SECONDS > deadline:
                    if isinstance(error, Full):
                        raise Full(f"{error}; raise store.segment_bytes or lower source.prefetch") from error
                    raise
                if isinstance(error, Full):
                    self._reconcile(keep=key)
                if self._client.stop.wait(_PUT_PAUSE_SECONDS):
                    raise

    def _meet_new_ledger(self) -> None:
        """The ledger was restarted and has forgotten our objects: nobody will ask for them."""
        log.warning("the ledger was restarted")
        message = self._client.config()
        if self.message is not None and _without_instance(message) != self.message:
            raise UserError(
                "the ledger at this address now serves another run", where=self._client.url, fix="start a new producer"
            )
        self._instance = self._client.instance
        self._reconcile()

    def _reconcile(self, keep: str = "") -> None:
        """Remove those of our objects that nobody needs: of a killed rank, or of a ledger before the present one.

        Most of what we list is long gone, consumed. Should a rank be reading one of them now, its checksum fails and it
        wants the pack again.
        """
        needed = self._client.reconcile(self._held) | {keep}
        self._drop([key for key in self._held if key not in needed])

    def _drop(self, keys: list[str]) -> None:
        for key in keys:
            try:
                self._store.remove(key)
            except StoreError as error:
                log.warning("%s", error)
                continue  # still held; the next time
            self._held.remove(key)


def _build_engine(config: ProducerConfig, spec: FeatureSpec) -> Any:
    target = resolve_target(TargetConfig(**config.target))
    if target.fingerprint != spec.target:
        raise UserError(
            f"the target here has the fingerprint {target.fingerprint}, the trainer wants {spec.target}",
            where=f"target {target.path}",
            fix="give producers and trainers the same weights and config",
        )
    return build_engine(target, spec)


def _without_instance(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "instance"}


@contextmanager
def _stopping_on_signals(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop`; the loop then ends after its current pack. (In a thread, signals are not ours.)"""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    handlers = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def main() -> None:
    """`python -m data_pipelines.stream.producer`: one producer process."""
    parser = argparse.ArgumentParser(prog="python -m data_pipelines.stream.producer", description="Run a producer.")
    parser.add_argument("--ledger", required=True, help="http://host:port")
    parser.add_argument("--token-file", required=True)
    parser.add_argument("--name", default=socket.gethostname())
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every poll
    run_producer(options.ledger, read_token(options.token_file), options.name)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"producer: {error}") from error
