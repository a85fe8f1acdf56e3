"""Where a trainer rank gets the features of the packs that it wants: one interface, four sources, the same features.

stream     producers compute what this rank wants (DESIGN §5)      colocated  the target runs in this process
hybrid     the same, behind a bounded cache of files               offline    a folder of files, filled before
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ..engines import Engine
from ..errors import FeatureError, UserError
from ..features import Features, FeatureSpec, check_values, decode, payload_bytes
from ..packing import Pack, pack_id
from ..run_folder import RunFolder
from ..stores import Store, StoreError, build_store
from ..stores.config import StoreConfig
from . import StreamError
from .cache import FeatureCache
from .client import LedgerClient
from .config import SourceConfig
from .messages import read_token
from .quarantine import Quarantine
from .wants import FAILED, STORED, UNKNOWN, Location, Want, pack_ids, want_id

log = logging.getLogger(__name__)


class Source(Protocol):
    """Gives features by (index in the plan, pack). Used by one thread, `interrupt` and `close` excepted.

    counts, for whoever watches: packs and bytes that came, lost (objects that were missing or corrupt, and had to be
    produced again), wanted_again (packs that a ledger had forgotten), quarantined.
    """

    counts: Counter[str]

    def want(self, items: list[tuple[int, Pack]]) -> None:
        """Announce packs that `get` will ask for, so that somebody begins to compute them."""

    def get(self, index: int, pack: Pack) -> Features | None:
        """Verified features of a pack; None for one that is in quarantine. Blocks, but never for ever: raises StreamError
        or UserError."""

    def interrupt(self) -> None:
        """Make a `get` that blocks in another thread raise soon. The source can only be closed afterwards."""

    def close(self) -> None: ...


def build_source(
    source: SourceConfig,
    store: StoreConfig,
    spec: FeatureSpec,
    run_dir: Path,
    *,
    rank: int,
    session: str,
    engine: Callable[[], Engine],
) -> Source:
    """The source that the configuration names.

    session: one random name for all ranks, new at each start of the trainer: the ledger serves the newest only. engine:
    loads the target; called for a colocated source only.
    """
    if source.name == "colocated":
        return ColocatedSource(engine(), spec)
    folder = Path(source.cache_dir) if source.cache_dir else RunFolder(run_dir).features
    if source.name == "offline":
        return OfflineSource(FeatureCache(folder, spec), spec)
    if not source.ledger:
        raise UserError(
            f"source={source.name} needs a ledger and producers",
            fix="draftsmith run <recipe> starts them; by hand: draftsmith ledger <recipe> …; without: source=colocated",
        )
    token, patience = read_token(source.token_file), source.patience_seconds
    stream = StreamSource(
        LedgerClient(source.ledger, token, patience=patience, ca_file=source.ca_file),
        build_store(store, role="consumer"),
        spec,
        session=session,
        patience_seconds=patience,
        rank=rank,
        quarantine=Quarantine(run_dir, source.max_quarantined) if source.on_poison == "quarantine" else None,
    )
    if source.name == "stream":
        return stream
    return HybridSource(FeatureCache(folder, spec, limit_bytes=source.cache_bytes), stream)


class ColocatedSource:
    """Computes each pack when it is asked for."""

    def __init__(self, engine: Engine, spec: FeatureSpec):
        self._engine, self._spec = engine, spec
        self.counts: Counter[str] = Counter()

    def want(self, items: list[tuple[int, Pack]]) -> None:
        pass

    def get(self, index: int, pack: Pack) -> Features:
        features = self._engine.compute(pack.input_ids, pack.lengths)
        try:
            check_values(features, self._spec)
        except FeatureError as error:
            raise StreamError(
                f"pack {index}: the target gives features that cannot be trained on: {error}", where=_documents(pack)
            ) from error
        self.counts["packs"] += 1
        return features

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


class OfflineSource:
    """Reads files that `cache.capture` wrote."""

    def __init__(self, cache: FeatureCache, spec: FeatureSpec):
        self._cache, self._spec = cache, spec
        self.counts: Counter[str] = Counter()

    def want(self, items: list[tuple[int, Pack]]) -> None:
        for index, pack in items:
            identity = pack_id(pack.input_ids, pack.lengths, self._spec.fingerprint)
            if not self._cache.has(identity):
                self._refuse(index, pack, identity, "are not in the cache")

    def get(self, index: int, pack: Pack) -> Features:
        identity = pack_id(pack.input_ids, pack.lengths, self._spec.fingerprint)
        try:
            features = self._cache.read(pack, identity)
        except FeatureError as error:
            self._refuse(index, pack, identity, f"must not be trained on: {error}")
        if features is None:
            self._refuse(index, pack, identity, "are not in the cache")
        self.counts["packs"] += 1
        return features

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _refuse(self, index: int, pack: Pack, identity: str, reason: str) -> None:
        raise UserError(
            f"the features of pack {index} ({_documents(pack)}) {reason}",
            where=str(self._cache.path(identity)),
            fix="capture this recipe's features (draftsmith capture): same target, data, taps, dtype and seed",
        )


class StreamSource:
    """Wants packs from the ledger, fetches them from the store, verifies, removes and acknowledges them.

    patience_seconds: without any pack stored by any producer, before StreamError. quarantine: takes the packs that no
    attempt could produce; without one they end the run.
    """

    def __init__(
        self,
        client: LedgerClient,
        store: Store,
        spec: FeatureSpec,
        *,
        session: str,
        patience_seconds: float,
        rank: int = 0,
        quarantine: Quarantine | None = None,
    ):
        self._client, self._store, self._spec, self._session = client, store, spec, session
        self._patience, self._rank, self._quarantine = patience_seconds, rank, quarantine
        self._outstanding: dict[str, Want] = {}
        self._closed = threading.Event()
        self.counts: Counter[str] = Counter()

    def want(self, items: list[tuple[int, Pack]]) -> None:
        wants = [self._describe(index, pack) for index, pack in items if not self.quarantined(index, pack)]
        self._outstanding.update((want.id, want) for want in wants)
        self._client.want(wants)

    def get(self, index: int, pack: Pack) -> Features | None:
        fetched = self.get_payload(index, pack)
        return None if fetched is None else fetched[0]

    def get_payload(self, index: int, pack: Pack) -> tuple[Features, bytes] | None:
        """Verified features and the bytes that they came as; None for a pack in quarantine."""
        if self.quarantined(index, pack):
            return None
        identity = self.identity(pack)
        want = want_id(self._session, index, identity)
        if want not in self._outstanding:
            self.want([(index, pack)])
        watch = _ProgressWatch(self._patience)
        while True:
            if self._closed.is_set():
                raise StreamError(f"closed while waiting for pack {index}")
            location = self._client.locate(want)
            if location.state == STORED:
                fetched = self._fetch(want, location, pack, identity)
                if fetched is not None:
                    return fetched
            elif location.state == FAILED:
                self._do_without(index, pack, identity, location)
                return None
            elif location.state == UNKNOWN:  # the ledger was restarted
                log.warning("the ledger has forgotten pack %d; wanting %d packs again", index, len(self._outstanding))
                self.counts["wanted_again"] += len(self._outstanding)
                self._client.want(self._outstanding.values())
            if watch.stalled(self._client.instance, location.progress):
                raise self._stalled(index)

    def wanted(self, index: int, pack: Pack) -> bool:
        """Whether this pack is on its way to this rank: it then has to be got from here, or nobody would remove it."""
        return want_id(self._session, index, self.identity(pack)) in self._outstanding

    def quarantined(self, index: int, pack: Pack) -> bool:
        return self._quarantine is not None and self._quarantine.holds(index, self.identity(pack))

    def identity(self, pack: Pack) -> str:
        return pack_id(pack.input_ids, pack.lengths, self._spec.fingerprint)

    def interrupt(self) -> None:
        self._closed.set()
        self._client.stop.set()

    def close(self) -> None:
        self.interrupt()
        self._store.close()
        self._client.close()

    def _fetch(self, want: str, location: Location, pack: Pack, identity: str) -> tuple[Features, bytes] | None:
        """Get, verify, remove, acknowledge. None when it has to be produced again."""
        try:
            payload = self._store.get(location.key, location.size)
            features = decode(
                payload,
                pack=identity,
                input_ids=pack.input_ids,
                lengths=pack.lengths,
                spec=self._spec,
                checksum=location.checksum,
            )
        except (StoreError, FeatureError) as error:
            reason = f"rank {self._rank} could not use it: {error}"
            log.warning("object %s is wanted again: %s", location.key, error)
            self.counts["lost"] += 1
            self._client.lost(want, location.lease, reason, removed=self._remove(location.key))
            return None
        removed = self._remove(location.key)
        self._outstanding.pop(want, None)
        superfluous = self._client.consumed(want, location.lease, removed=removed)
        if superfluous:
            self._remove(superfluous)
        self.counts["packs"] += 1
        self.counts["bytes"] += len(payload)
        return features, payload

    def _remove(self, key: str) -> bool:
        """Of what has been read, or is of no use. False: it failed, and the producer removes the object in its own time."""
        try:
            self._store.remove(key)
        except StoreError as error:
            log.warning("%s", error)
            return False
        return True

    def _describe(self, index: int, pack: Pack) -> Want:
        return Want(
            session=self._session,
            index=index,
            pack=self.identity(pack),
            features=self._spec.fingerprint,
            bytes=payload_bytes(self._spec, len(pack)),
            input_ids=pack_ids(pack.input_ids),
            lengths=list(pack.lengths),
        )

    def _do_without(self, index: int, pack: Pack, identity: str, location: Location) -> None:
        """Into the quarantine with a pack that no attempt could produce; without one, StreamError."""
        dead = self._dead(index, pack, identity, location)
        if self._quarantine is None:
            raise dead
        self._quarantine.add(index, identity, pack, location.reasons)
        self.counts["quarantined"] += 1
        log.warning("the run does without a pack: %s", dead)
        self._outstanding.pop(want_id(self._session, index, identity), None)
        self._client.consumed(want_id(self._session, index, identity), "")

    def _dead(self, index: int, pack: Pack, identity: str, location: Location) -> StreamError:
        reasons = "\n".join(f"  attempt {n}: {reason}" for n, reason in enumerate(location.reasons, 1))
        return StreamError(
            f"pack {index} ({identity}) could not be produced in {len(location.reasons)} attempts:\n{reasons}",
            where=_documents(pack),
            fix="look at these documents and at logs/producer-*.log; take the rows out if they are at fault",
        )

    def _stalled(self, index: int) -> StreamError:
        status = self._client.status()
        producers = ", ".join(f"{p['name']} ({p['seen']:.0f} s ago)" for p in status["producers"]) or "none"
        packs = ", ".join(f"{count} {state}" for state, count in status["packs"].items())
        return StreamError(
            f"no producer has stored a pack for {self._patience:.0f} s; rank {self._rank} waits for pack {index}",
            where=f"ledger {self._client.url}: packs {packs}; producers seen: {producers}",
            fix="look at logs/producer-*.log; raise source.patience_seconds if the target only needs longer to load",
        )


class HybridSource:
    """A stream with a bounded cache of files in front: later epochs read what fitted in the first."""

    def __init__(self, cache: FeatureCache, stream: StreamSource):
        self._cache, self._stream = cache, stream
        self.counts = stream.counts

    def want(self, items: list[tuple[int, Pack]]) -> None:
        self._stream.want([(index, pack) for index, pack in items if not self._cache.has(self._stream.identity(pack))])

    def get(self, index: int, pack: Pack) -> Features | None:
        if self._stream.quarantined(index, pack):  # first, should the same pack have come to the cache in a later epoch
            return None
        identity = self._stream.identity(pack)
        if not self._stream.wanted(index, pack):
            try:
                features = self._cache.read(pack, identity)
            except FeatureError as error:
                log.warning("%s is streamed again: %s", self._cache.path(identity), error)
                self._cache.discard(identity)
            else:
                if features is not None:
                    self.counts["packs"] += 1
                    return features
        fetched = self._stream.get_payload(index, pack)
        if fetched is None:
            return None
        features, payload = fetched
        if not self._cache.has(identity):
            try:
                self._cache.write(identity, payload)
            except StoreError as error:
                log.warning("not cached: %s", error)
        return features

    def interrupt(self) -> None:
        self._stream.interrupt()

    def close(self) -> None:
        self._stream.close()


class _ProgressWatch:
    """Tells when a growing count has not grown for `patience` seconds. A restarted ledger counts from 0 again."""

    def __init__(self, patience: float):
        self._patience, self._since = patience, time.monotonic()
        self._instance, self._count = "", 0

    def stalled(self, instance: str, count: int) -> bool:
        before = self._count if instance == self._instance else 0
        if count > before:
            self._since = time.monotonic()
        self._instance, self._count = instance, count
        return time.monotonic() - self._since > self._patience


def _documents(pack: Pack) -> str:
    origins = [origin or "?" for origin in pack.origins]
    return f"documents {', '.join(origins)}"
