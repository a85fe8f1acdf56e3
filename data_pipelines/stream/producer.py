"""A producer: lease a pack, let the target compute it, put the features into the store, report them; again and again.

It needs the ledger's address and token and nothing else: no data set, no shared folder, no configuration. It may be
killed at any time; its leases then expire and others do its work.

By hand: `python -m data_pipelines.stream.producer --help`.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..engines import build_engine
from ..engines.targets import TargetConfig, resolve_target
from ..errors import UserError
from ..features import FeatureSpec, encode, read_metadata
from ..logs import configure_logging, fields
from ..stores import Full, Store, StoreError, build_store
from .client import LedgerClient
from .messages import ProducerConfig, read_token
from .metrics import ProducerCollector, serve_metrics
from .wants import Lease, object_key, unpack_ids

log = logging.getLogger(__name__)

_LEASE_MARGIN = 0.9  # the part of a lease in which a put is tried: a later one would be refused
_PUT_PAUSE_SECONDS = 0.2
_RECONCILE_EVERY = 64  # stored packs


def run_producer(
    url: str,
    token: str,
    name: str,
    *,
    patience: float = 120.0,
    metrics_port: int = 0,
    metrics_host: str = "127.0.0.1",
    ca_file: str = "",
) -> None:
    """Serve the ledger at `url` until it says that the run is finished, or SIGTERM or SIGINT; then return.

    name: for logs and the status page. patience: seconds for which an unreachable ledger is called again.
    metrics_port: where Prometheus finds what this producer does; 0 for nowhere. ca_file: see `LedgerClient`.
    Raises UserError when the target or the versions here are not those that the trainer wants, StreamError when the
    ledger stays away.
    """
    client = LedgerClient(url, token, patience=patience, ca_file=ca_file)
    with _stopping_on_signals(client.stop), ExitStack() as opened:
        opened.callback(client.close)
        try:
            message = client.config()
            config, instance = ProducerConfig.from_json(message), client.instance
            spec = FeatureSpec(**config.spec)
            if config.threads:
                torch.set_num_threads(config.threads)
            engine = _build_engine(config, spec)
            store = build_store(config.store, role="producer")
            opened.callback(store.close)
            producer = Producer(f"{name}-{uuid.uuid4().hex[:6]}", client, store, spec, engine, instance)
            producer.capacity = 0 if config.store.name == "filesystem" else config.store.segment_bytes
            producer.message = _without_instance(message)
            if metrics_port:
                opened.callback(serve_metrics(ProducerCollector(name, producer.numbers), metrics_host, metrics_port))
            producer.serve()
        except UserError:
            if not client.stop.is_set():
                raise


class Producer:
    """The loop of one producer. `client.stop` ends it after the current pack.

    capacity [bytes]: what it lends to the store; 0 if the store has no bound.
    """

    def __init__(
        self, name: str, client: LedgerClient, store: Store, spec: FeatureSpec, engine: Any, instance: str = ""
    ):
        self.name, self.message, self.capacity = name, None, 0
        self._client, self._store, self._spec, self._engine = client, store, spec, engine
        self._instance = instance
        self._held: list[str] = []  # keys of own objects that nobody has told us are gone
        self._stubborn = False  # the store has refused to remove some of them
        self._counts = dict.fromkeys(("stored", "bytes", "failed", "compute_seconds", "put_seconds", "idle_seconds"), 0)

    def numbers(self) -> dict[str, float]:
        """What it has done since it started: packs, bytes and seconds, for Prometheus."""
        return {**self._counts, "capacity": self.capacity}

    def serve(self) -> None:
        log.info("%s serves %s (features %s)", self.name, self._client.url, self._spec.fingerprint)
        while not self._client.stop.is_set():
            with self._timing("idle_seconds"):
                lease, finished = self._client.lease(self.name, self._spec.fingerprint, about=self._about())
            if finished:
                break
            if self._client.instance != self._instance:
                self._meet_new_ledger()
            elif self._client.asked_to_reconcile or self._stubborn:
                self._reconcile()
            if lease is not None:
                self._work(lease)
        log.info("%s ends after %d packs", self.name, self._counts["stored"])

    def _about(self) -> dict[str, Any]:
        seconds = {name: self._counts[name] for name in ("compute_seconds", "put_seconds", "idle_seconds")}
        return {"host": socket.gethostname(), "pid": os.getpid(), "capacity": self.capacity, **seconds}

    @contextmanager
    def _timing(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._counts[name] += time.monotonic() - began

    def _work(self, lease: Lease) -> None:
        """One pack. Whatever goes wrong with it is reported to the ledger; the producer goes on with the next."""
        began = time.monotonic()
        key = object_key(lease.pack, lease.lease)
        about = {"pack": lease.index, "key": key}
        log.info("leased", extra=fields(**about, tokens=sum(lease.lengths)))
        try:
            with self._timing("compute_seconds"):
                payload = self._compute(lease)
            if time.monotonic() > began + lease.seconds:
                raise TimeoutError(f"computed after the lease's {lease.seconds:g} s; raise source.lease_seconds")
            with self._timing("put_seconds"):
                self._put(key, payload, deadline=began + _LEASE_MARGIN * lease.seconds)
        except Exception as error:
            log.exception("failed", extra=fields(**about))
            self._counts["failed"] += 1
            self._client.failed(self.name, lease.want, lease.lease, f"{type(error).__name__}: {error}")
            return
        size, checksum = len(payload), read_metadata(payload)["checksum"]
        if self._client.stored(self.name, lease.want, lease.lease, size, checksum):
            self._counts["stored"] += 1
            self._counts["bytes"] += size
            log.info("stored", extra=fields(**about, bytes=size, seconds=time.monotonic() - began))
            if len(self._held) >= _RECONCILE_EVERY:
                self._reconcile()
        else:
            log.warning("too late or not wanted any more; its object is removed", extra=fields(**about))
            self._drop([key])

    def _compute(self, lease: Lease) -> bytes:
        input_ids = unpack_ids(lease.input_ids)
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
                        advice = "raise store.segment_bytes, or lower source.window_bytes or source.prefetch"
                        raise Full(f"{error}; {advice}") from error
                    raise
                if isinstance(error, Full):
                    self._reconcile(keep=key)
                if self._client.stop.wait(_PUT_PAUSE_SECONDS):
                    raise

    def _meet_new_ledger(self) -> None:
        """The ledger has forgotten our objects (it was restarted, or the trainer was): nobody will ask for them."""
        log.warning("the ledger begins anew", extra=fields(instance=self._client.instance))
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
        needed = self._client.reconcile(self.name, self._held) | {keep}
        superfluous = [key for key in self._held if key not in needed]
        if superfluous:
            self._drop(superfluous)
            self._client.reconcile(self.name, self._held)  # what is gone frees its room in the window

    def _drop(self, keys: list[str]) -> None:
        self._stubborn = False
        for key in keys:
            try:
                self._store.remove(key)
            except StoreError as error:
                log.warning("%s", error)
                self._stubborn = True  # it is still held; the next time
                continue
            self._held.remove(key)


def _build_engine(config: ProducerConfig, spec: FeatureSpec) -> Any:
    target = resolve_target(TargetConfig(**config.target))
    if target.fingerprint != spec.target:
        raise UserError(
            f"the target here has the fingerprint {target.fingerprint}, the trainer wants {spec.target}",
            where=f"target {target.path}",
            fix="give producers and trainers the same weights and config",
        )
    return build_engine(target, spec, config.target["options"])


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
    parser.add_argument("--ledger", required=True, help="http(s)://host:port")
    parser.add_argument("--token-file", required=True)
    parser.add_argument("--name", default=socket.gethostname())
    parser.add_argument("--ca-file", default="", help="PEM file to trust the ledger's certificate by")
    parser.add_argument("--metrics-port", type=int, default=0, help="serve Prometheus metrics there")
    parser.add_argument("--metrics-host", default="127.0.0.1")
    options = parser.parse_args()
    configure_logging(options.name)
    run_producer(
        options.ledger, read_token(options.token_file), options.name,
        metrics_port=options.metrics_port, metrics_host=options.metrics_host, ca_file=options.ca_file,
    )  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"producer: {error}") from error
