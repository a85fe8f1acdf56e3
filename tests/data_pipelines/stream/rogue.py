"""A producer that cheats: it has the token, speaks the protocol, and answers its leases with something else.

    python -m tests.data_pipelines.stream.rogue --ledger URL --token-file FILE --crime nan --times 3

What it cannot be caught at: finite features of the right shape, honestly labelled, that are simply not the target's. Only
computing the pack again would tell; whoever holds the token is trusted that far.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from data_pipelines.engines import build_engine, resolve_target
from data_pipelines.engines.targets import TargetConfig
from data_pipelines.features import Features, FeatureSpec, _checksum, _header, _layout, encode, read_metadata
from data_pipelines.stores import Store, build_store
from data_pipelines.stream.client import LedgerClient
from data_pipelines.stream.messages import ProducerConfig, read_token
from data_pipelines.stream.wants import Lease, object_key, pack_ids, unpack_ids


class Rogue:
    """Commits `crime` on each of its next leases. `committed` counts them."""

    def __init__(self, name: str, client: LedgerClient, store: Store, spec: FeatureSpec, engine: Any, crime: str):
        self.name, self.committed = name, 0
        self._client, self._store, self._spec, self._engine = client, store, spec, engine
        self._crime = CRIMES[crime]

    def serve(self, times: int) -> None:
        """Returns after `times` crimes, or when the run is finished or `client.stop` is set."""
        while self.committed < times and not self._client.stop.is_set():
            lease, finished = self._client.lease(self.name, self._spec.fingerprint)
            if finished:
                return
            if lease is not None:
                self._crime(self, lease)
                self.committed += 1

    # What the crimes are made of

    def features(self, lease: Lease) -> Features:
        return self._engine.compute(unpack_ids(lease.input_ids), tuple(lease.lengths))

    def payload(self, lease: Lease, features: Features | None = None, **changes: Any) -> bytes:
        """A payload with a right checksum, honest but for `changes`."""
        labels = {
            "pack": lease.pack,
            "input_ids": unpack_ids(lease.input_ids),
            "lengths": lease.lengths,
            "spec": self._spec,
        }
        return encode(features or self.features(lease), **{**labels, **changes})

    def answer(self, lease: Lease, payload: bytes, *, stated: bytes | None = None, size: int | None = None) -> bool:
        """Put `payload`, and report it with the size and the checksum of `stated`."""
        stated = payload if stated is None else stated
        self._store.put(object_key(lease.pack, lease.lease), payload)
        return self.report(lease, len(payload) if size is None else size, read_metadata(stated)["checksum"])

    def report(self, lease: Lease, size: int, checksum: str) -> bool:
        return self._client.stored(self.name, lease.want, lease.lease, size, checksum)

    def discard(self, lease: Lease) -> None:
        """What a refused answer has left in the store."""
        self._store.remove(object_key(lease.pack, lease.lease))

    # Crimes

    def not_finite(self, lease: Lease) -> None:
        features = self.features(lease)
        features.final[-1, 0] = float("nan")
        self.answer(lease, self.payload(lease, features))

    def zeros(self, lease: Lease) -> None:
        features = self.features(lease)
        self.answer(lease, self.payload(lease, replace(features, taps=torch.zeros_like(features.taps))))

    def another_pack(self, lease: Lease) -> None:
        """The honest features of other token ids, under their own name."""
        self.answer(lease, self._other(lease, pack="0123456789abcdef"))

    def another_pack_relabelled(self, lease: Lease) -> None:
        """The same, under the name of the pack that was asked for."""
        self.answer(lease, self._other(lease, pack=lease.pack))

    def _other(self, lease: Lease, *, pack: str) -> bytes:
        other = replace(lease, input_ids=pack_ids(unpack_ids(lease.input_ids)[::-1]))
        return self.payload(other, pack=pack)

    def wrong_taps(self, lease: Lease) -> None:
        spec = replace(self._spec, taps=(*self._spec.taps[:-1], self._spec.taps[-1] + 1))
        self.answer(lease, self.payload(lease, spec=spec))

    def too_few_taps(self, lease: Lease) -> None:
        features = self.features(lease)
        few = replace(features, taps=features.taps[:, 1:])
        self.answer(lease, self._forged(lease, few, taps=self._spec.taps[1:]))

    def wrong_dtype(self, lease: Lease) -> None:
        features = self.features(lease)
        self.answer(lease, self._forged(lease, Features(features.taps.half(), features.final.half()), dtype="float16"))

    def _forged(self, lease: Lease, features: Features, **changes: Any) -> bytes:
        """Features of a spec with `changes`, labelled as those of the spec that was asked for; the checksum is right."""
        spec = replace(self._spec, **changes)
        honest = self.payload(lease, features, spec=spec)
        layout = _layout(spec, sum(lease.lengths))
        body = honest[len(_header(layout, read_metadata(honest))) :]
        labels = {"pack": lease.pack, "features": self._spec.fingerprint}
        checksum = _checksum(layout, labels, [np.frombuffer(body, dtype=np.uint8)])
        return _header(layout, {**labels, "checksum": checksum}) + body

    def another_layout(self, lease: Lease) -> None:
        """All documents computed as one: they have seen each other."""
        self.answer(lease, self.payload(replace(lease, lengths=[1, sum(lease.lengths) - 1])))

    def flipped_bit(self, lease: Lease) -> None:
        honest = self.payload(lease)
        broken = bytearray(honest)
        broken[len(broken) // 2] ^= 4
        self.answer(lease, bytes(broken), stated=honest)

    def truncated(self, lease: Lease) -> None:
        honest = self.payload(lease)
        self.answer(lease, honest[:-100], stated=honest, size=len(honest))

    def truncated_openly(self, lease: Lease) -> None:
        honest = self.payload(lease)
        self.answer(lease, honest[:-100], stated=honest)

    def rubbish(self, lease: Lease) -> None:
        honest = self.payload(lease)
        self.answer(lease, os.urandom(len(honest)), stated=honest)

    def wrong_checksum(self, lease: Lease) -> None:
        payload = self.payload(lease)
        self._store.put(object_key(lease.pack, lease.lease), payload)
        self.report(lease, len(payload), "0" * 32)

    def never_put(self, lease: Lease) -> None:
        payload = self.payload(lease)
        self.report(lease, len(payload), read_metadata(payload)["checksum"])

    def immense(self, lease: Lease) -> None:
        """A size that nobody can make room for."""
        payload = self.payload(lease)
        if not self.answer(lease, payload, size=2**50):
            self.discard(lease)

    def negative_size(self, lease: Lease) -> None:
        payload = self.payload(lease)
        try:
            accepted = self.answer(lease, payload, size=-1)
        except Exception:  # the ledger may also find the request a bad one
            accepted = False
        if not accepted:
            self.discard(lease)

    def nothing_at_all(self, lease: Lease) -> None:
        payload = self.payload(lease)
        if not self.report(lease, 0, read_metadata(payload)["checksum"]):
            self.discard(lease)

    def twice(self, lease: Lease) -> None:
        """An honest answer, given twice: the second is a repeated call and changes nothing."""
        payload = self.payload(lease)
        self.answer(lease, payload)
        self.report(lease, len(payload), read_metadata(payload)["checksum"])

    def two_answers(self, lease: Lease) -> None:
        """A bad answer, then an honest report for the same lease: the store keeps what was put first."""
        honest = self.payload(lease)
        features = self.features(lease)
        self.answer(lease, self.payload(lease, Features(-features.taps, -features.final)), stated=honest)
        self.answer(lease, honest)

    def somebody_elses_lease(self, lease: Lease) -> None:
        """Answers and gives up leases that it does not hold; then does its own work, so that nothing is held up."""
        payload = self.payload(lease)
        stranger = replace(lease, lease="f" * 16)
        assert not self.answer(stranger, payload)
        self.discard(stranger)
        assert not self._client.failed(self.name, lease.want, "f" * 16, "not mine")
        assert not self._client.lost(lease.want, "f" * 16, "not mine")
        self.answer(lease, payload)

    def gives_up(self, lease: Lease) -> None:
        self._client.failed(self.name, lease.want, lease.lease, "does not want to\n\x1b[31m<b>")

    def says_nothing(self, lease: Lease) -> None:
        """Keeps the lease until it ends."""
        time.sleep(lease.seconds)


# What the ledger records of each crime: part of the reason; "" for nothing at all.
REASONS = {
    "not_finite": "not finite",
    "zeros": "all zeros",
    "another_pack": "features of pack 0123456789abcdef, not of",
    "another_pack_relabelled": "computed from other token ids",
    "wrong_taps": "another target, taps or dtype",
    "too_few_taps": "bytes of another layout",
    "wrong_dtype": "bytes of another layout",
    "another_layout": "another layout of documents",
    "flipped_bit": "corrupt",
    "truncated": "bytes, not",
    "truncated_openly": "bytes of another layout",
    "rubbish": "not a features payload",
    "wrong_checksum": "is not the one that the producer reported",
    "never_put": "there is no such object",
    "immense": "more than the",
    "negative_size": "has not answered within",
    "nothing_at_all": "could not use it",
    "twice": "",
    "two_answers": "is not the one that the producer reported",
    "somebody_elses_lease": "what nobody wants",
    "gives_up": "does not want to",
    "says_nothing": "has not answered within",
}
LEASES_LEFT_TO_END = ("negative_size", "says_nothing")
CRIMES: dict[str, Callable[[Rogue, Lease], None]] = {name: getattr(Rogue, name) for name in REASONS}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.data_pipelines.stream.rogue", description=__doc__)
    parser.add_argument("--ledger", required=True)
    parser.add_argument("--token-file", required=True)
    parser.add_argument("--crime", required=True, choices=sorted(CRIMES))
    parser.add_argument("--times", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    client = LedgerClient(options.ledger, read_token(options.token_file), patience=20.0)
    config = ProducerConfig.from_json(client.config())
    spec = FeatureSpec(**config.spec)
    engine = build_engine(resolve_target(TargetConfig(**config.target)), spec)
    store = build_store(config.store, role="producer")
    rogue = Rogue(f"rogue-{options.crime}-{os.getpid()}", client, store, spec, engine, options.crime)
    try:
        rogue.serve(options.times)
        time.sleep(1)  # its objects live in its memory: until somebody has looked at them
    finally:
        store.close()
        client.close()
    print(f"{options.crime}: {rogue.committed} times")


if __name__ == "__main__":
    main()
