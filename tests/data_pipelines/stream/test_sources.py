"""Sources against a ledger behind a real socket; the producer is a thread, so that a test can make it fail."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from data_pipelines.errors import FeatureError, UserError
from data_pipelines.features import Features
from data_pipelines.packing import Document, Pack
from data_pipelines.stores import build_store
from data_pipelines.stores.config import StoreConfig
from data_pipelines.stream import StreamError
from data_pipelines.stream.cache import FeatureCache, capture
from data_pipelines.stream.config import SourceConfig
from data_pipelines.stream.quarantine import Quarantine, read_quarantine
from data_pipelines.stream.sources import ColocatedSource, HybridSource, OfflineSource, build_source

from .conftest import identity, producer_thread, stream_source, wait_until


@pytest.fixture
def store(tmp_path) -> StoreConfig:
    return StoreConfig("filesystem", path=str(tmp_path / "store"))


def equal(a: Features, b: Features) -> bool:
    return torch.equal(a.taps, b.taps) and torch.equal(a.final, b.final)


class FailsOn:
    """An engine that fails on some packs, and counts what it computes."""

    def __init__(self, engine, *bad: Pack):
        self._engine, self._bad, self.computed = engine, [pack.lengths for pack in bad], 0

    def compute(self, input_ids, lengths):
        self.computed += 1
        if tuple(lengths) in self._bad:
            raise RuntimeError("this pack cannot be computed")
        return self._engine.compute(input_ids, lengths)


class Slow:
    """An engine that takes `seconds` for its first pack."""

    def __init__(self, engine, seconds: float):
        self._engine, self._seconds = engine, seconds

    def compute(self, input_ids, lengths):
        time.sleep(self._seconds)
        self._seconds = 0
        return self._engine.compute(input_ids, lengths)


def test_a_corrupt_object_is_produced_again_and_right_in_the_end(start_ledger, store, spec, engine, packs):
    ledger = start_ledger()
    with producer_thread(ledger, store, spec, engine), stream_source(ledger, store, spec) as source:
        source.want([(0, packs[0]), (1, packs[1])])
        wait_until(lambda: ledger.status()["packs"]["stored"] == 2, 20)
        for path in Path(store.path).iterdir():
            damaged = bytearray(path.read_bytes())
            damaged[-100] ^= 1
            path.write_bytes(damaged)
        for index in (0, 1):
            assert equal(source.get(index, packs[index]), ColocatedSource(engine, spec).get(index, packs[index]))
        totals = ledger.status()["totals"]
        assert (totals["lost"], totals["stored"], totals["consumed"]) == (2, 4, 2)
        assert not list(Path(store.path).iterdir())


@pytest.mark.parametrize("damage", ["missing", "truncated", "of another pack"])
def test_other_damage_is_noticed_too(start_ledger, store, spec, engine, packs, damage):
    ledger = start_ledger()
    with producer_thread(ledger, store, spec, engine), stream_source(ledger, store, spec) as source:
        source.want([(0, packs[0]), (29, packs[29])] if damage == "of another pack" else [(0, packs[0])])
        wait_until(lambda: ledger.status()["packs"]["wanted"] + ledger.status()["packs"]["leased"] == 0, 20)
        path = next(Path(store.path).glob(f"{identity(packs[0], spec)}-*"))
        if damage == "missing":
            path.unlink()
        elif damage == "truncated":
            path.write_bytes(path.read_bytes()[:1000])
        else:
            other = build_store(store, role="consumer")
            source.want([(5, packs[5])])
            wait_until(lambda: ledger.status()["packs"]["stored"] == 3, 20)
            [wrong] = Path(store.path).glob(f"{identity(packs[5], spec)}-*")
            for victim in Path(store.path).glob(f"{identity(packs[0], spec)}-*"):
                victim.write_bytes(wrong.read_bytes())
            other.close()
        assert equal(source.get(0, packs[0]), ColocatedSource(engine, spec).get(0, packs[0]))
        assert ledger.status()["totals"]["lost"] >= 1


def test_a_pack_that_nobody_can_compute_is_named_with_its_documents_and_every_reason(
    start_ledger, store, spec, engine, packs
):
    bad = packs[2]
    ledger = start_ledger(max_attempts=3)
    with producer_thread(ledger, store, spec, FailsOn(engine, bad)), stream_source(ledger, store, spec) as source:
        source.want([(1, packs[1]), (2, bad)])
        assert source.get(1, packs[1])
        with pytest.raises(StreamError) as error:
            source.get(2, bad)
    text = str(error.value)
    assert text.count("RuntimeError: this pack cannot be computed") == 3
    assert "pack 2" in text and identity(bad, spec) in text
    assert all(origin in text for origin in bad.origins)


def test_an_answer_after_the_lease_is_refused_and_its_object_removed(start_ledger, store, spec, engine, packs):
    ledger = start_ledger(lease_seconds=1)
    with producer_thread(ledger, store, spec, Slow(engine, 1.6)), stream_source(ledger, store, spec) as source:
        assert equal(source.get(0, packs[0]), ColocatedSource(engine, spec).get(0, packs[0]))
        totals = ledger.status()["totals"]
        assert (totals["expired"], totals["refused"], totals["consumed"]) == (1, 1, 1)
        assert not list(Path(store.path).iterdir())


def test_equal_packs_in_one_window_both_arrive(start_ledger, store, spec, engine, packs):
    ledger = start_ledger()
    with producer_thread(ledger, store, spec, engine), stream_source(ledger, store, spec) as source:
        source.want([(0, packs[0]), (29, packs[29])])
        assert equal(source.get(0, packs[0]), source.get(29, packs[29]))
    assert ledger.status()["totals"]["consumed"] == 2


def test_two_ranks_share_a_ledger(start_ledger, store, spec, engine, packs):
    ledger = start_ledger()
    reference = ColocatedSource(engine, spec)
    wrong = []

    def rank(number: int) -> None:
        with stream_source(ledger, store, spec) as source:
            mine = list(enumerate(packs))[number:10:2]
            source.want(mine)
            for index, pack in mine:
                if not equal(source.get(index, pack), reference.get(index, pack)):
                    wrong.append(index)
        wrong.append(("done", number))

    with producer_thread(ledger, store, spec, engine):
        threads = [threading.Thread(target=rank, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sorted(wrong) == [("done", 0), ("done", 1)]


def test_with_a_quarantine_the_run_does_without_a_pack_that_nobody_can_compute(
    start_ledger, store, spec, engine, packs, tmp_path
):
    bad = packs[2]
    ledger = start_ledger(max_attempts=3)
    failing = FailsOn(engine, bad)
    with producer_thread(ledger, store, spec, failing):
        quarantine = Quarantine(tmp_path, most=2)
        with stream_source(ledger, store, spec, quarantine=quarantine) as source:
            source.want([(1, packs[1]), (2, bad), (3, packs[3])])
            assert [source.get(i, packs[i]) is None for i in (1, 2, 3)] == [False, True, False]
            assert source.counts == {"packs": 2, "quarantined": 1, "bytes": source.counts["bytes"]}
        status = ledger.status()
        assert (status["quarantined"], status["packs"]["failed"], status["next_index"]) == (1, 0, None)
        (line,) = read_quarantine(tmp_path)
        assert (line["pack"], line["index"], line["documents"]) == (identity(bad, spec), 2, bad.origins)
        assert len(line["reasons"]) == 3 and all("this pack cannot be computed" in r for r in line["reasons"])

        # Resumed: the same packs are gone, though they could be computed now; nobody is asked.
        attempts, failing._bad = failing.computed, []
        again = Quarantine(tmp_path, most=2)
        with stream_source(ledger, store, spec, session="the-next", quarantine=again) as source:
            hybrid = HybridSource(FeatureCache(tmp_path / "cache", spec), source)
            for one in (source, hybrid):
                one.want([(2, bad)])
                assert one.get(2, bad) is None
            assert failing.computed == attempts
            assert hybrid.get(7, bad) is not None, "another use of the pack is tried"
            assert hybrid.get(2, bad) is None, "now in the cache, and still not trained on here"


def test_too_many_in_quarantine_stop_the_run_and_are_named(start_ledger, store, spec, engine, packs, tmp_path):
    ledger = start_ledger(max_attempts=1)
    with producer_thread(ledger, store, spec, FailsOn(engine, packs[2], packs[4])):
        with stream_source(ledger, store, spec, quarantine=Quarantine(tmp_path, most=1)) as source:
            assert source.get(2, packs[2]) is None
            with pytest.raises(StreamError, match=r"2 packs .* more than source\.max_quarantined=1") as error:
                source.get(4, packs[4])
    for index in (2, 4):
        assert f"pack {index} ({identity(packs[index], spec)}): {', '.join(packs[index].origins)}" in str(error.value)
    with pytest.raises(StreamError, match="more than source"):
        Quarantine(tmp_path, most=1)  # nor does a resumed run go on
    Quarantine(tmp_path, most=2)


def test_a_newer_session_takes_over_and_the_old_one_is_told(start_ledger, store, spec, engine, packs):
    ledger = start_ledger()
    with producer_thread(ledger, store, spec, engine):
        with stream_source(ledger, store, spec) as old, stream_source(ledger, store, spec, session="newer") as new:
            assert old.get(0, packs[0]) is not None
            assert new.get(0, packs[0]) is not None
            with pytest.raises(StreamError, match="a newer trainer has taken over this ledger"):
                old.get(1, packs[1])
            assert equal(new.get(1, packs[1]), ColocatedSource(engine, spec).get(1, packs[1]))


def test_a_full_store_makes_the_producer_wait_and_nothing_is_lost(start_ledger, spec, engine, packs, tmp_path):
    """Room for about two packs, a window of twelve."""
    size = max(len(pack) for pack in packs) * spec.hidden_size * 4 * 3
    store = StoreConfig("memory", path=str(tmp_path), segment_bytes=2 * size + 10_000)
    ledger = start_ledger(max_attempts=1)
    with producer_thread(ledger, store, spec, engine), stream_source(ledger, store, spec) as source:
        source.want(list(enumerate(packs[:12])))
        for index, pack in enumerate(packs[:12]):
            source.get(index, pack)
            time.sleep(0.02)
    totals = ledger.status()["totals"]
    assert (totals["stored"], totals["failed"], totals["expired"]) == (12, 0, 0)


def test_an_object_larger_than_the_store_is_a_reason_and_not_a_hang(start_ledger, spec, engine, packs, tmp_path):
    store = StoreConfig("memory", path=str(tmp_path), segment_bytes=1000)
    ledger = start_ledger(max_attempts=1, lease_seconds=1.5)
    with producer_thread(ledger, store, spec, engine), stream_source(ledger, store, spec) as source:
        with pytest.raises(StreamError, match=r"raise store\.segment_bytes"):
            source.get(0, packs[0])


def test_a_killed_master_loses_its_objects_and_the_stream_goes_on(start_ledger, own_master, spec, engine, packs):
    store = StoreConfig("mooncake", master=own_master.address, segment_bytes=64 * 1024**2, buffer_bytes=16 * 1024**2)
    ledger = start_ledger(max_attempts=5)
    with producer_thread(ledger, store, spec, engine), stream_source(ledger, store, spec) as source:
        for index, pack in enumerate(packs[:8]):
            if index == 3:
                source.want(list(enumerate(packs))[3:8])
                wait_until(lambda: ledger.status()["packs"]["stored"] == 5, 20)
                own_master.kill()
                own_master.start()
            assert equal(source.get(index, pack), ColocatedSource(engine, spec).get(index, pack))
        assert ledger.status()["totals"]["lost"] >= 5
        assert not own_master.objects()


def test_no_producer_is_an_error_after_the_patience(start_ledger, store, spec, packs):
    ledger = start_ledger()
    with stream_source(ledger, store, spec, patience=1) as source:
        began = time.monotonic()
        with pytest.raises(StreamError, match="no producer has stored a pack for 1 s") as error:
            source.get(0, packs[0])
    assert time.monotonic() - began < 10
    assert "1 wanted" in str(error.value) and "producers seen: none" in str(error.value)


def test_a_ledger_that_stays_away_is_an_error_after_the_patience(start_ledger, store, spec, packs):
    ledger = start_ledger()
    with stream_source(ledger, store, spec, patience=1) as source:
        ledger.stop()
        with pytest.raises(StreamError, match="the ledger has not answered for 1 s"):
            source.get(0, packs[0])


def test_a_blocked_get_can_be_interrupted(start_ledger, store, spec, packs):
    ledger = start_ledger()
    with stream_source(ledger, store, spec) as source:
        threading.Timer(0.5, source.interrupt).start()
        began = time.monotonic()
        with pytest.raises(StreamError, match="closed"):
            source.get(0, packs[0])
        assert time.monotonic() - began < 6


def test_hybrid_fills_its_cache_and_then_needs_no_stream(start_ledger, store, spec, engine, packs, tmp_path):
    ledger = start_ledger()
    config = SourceConfig("hybrid", ledger=ledger.url, token_file=ledger.token_file)
    source = build_source(
        config, store, spec, tmp_path, rank=0, session="s", engine=lambda: pytest.fail("no engine here")
    )
    items = list(enumerate(packs[:4]))
    counting = FailsOn(engine)
    with producer_thread(ledger, store, spec, counting):
        for epoch in range(2):
            numbered = [(index + 4 * epoch, pack) for index, pack in items]
            source.want(numbered)
            for index, pack in numbered:
                assert equal(source.get(index, pack), ColocatedSource(engine, spec).get(index, pack))
        assert counting.computed == 4
        assert len(list((tmp_path / "features").glob("*.safetensors"))) == 4

        file = tmp_path / "features" / f"{identity(packs[0], spec)}.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        source.want([(8, packs[0])])
        assert equal(source.get(8, packs[0]), ColocatedSource(engine, spec).get(8, packs[0]))
        assert counting.computed == 5, "a damaged file is streamed again"
    source.close()


def test_the_hybrid_cache_keeps_its_limit(start_ledger, store, spec, engine, packs, tmp_path):
    ledger = start_ledger()
    limit = 2 * max(len(pack) for pack in packs) * spec.hidden_size * 4 * 3
    with producer_thread(ledger, store, spec, engine), stream_source(ledger, store, spec) as stream:
        cache = FeatureCache(tmp_path / "cache", spec, limit_bytes=limit)
        source = HybridSource(cache, stream)
        for index, pack in enumerate(packs[:10]):
            source.get(index, pack)
    held = sum(path.stat().st_size for path in (tmp_path / "cache").iterdir())
    assert limit / 3 < held <= limit


def test_capture_fills_a_folder_that_offline_reads(spec, engine, packs, tmp_path):
    counting = FailsOn(engine)
    done = [capture(packs, counting, spec, tmp_path, shard=shard, shards=2) for shard in range(2)]
    assert sum(part.computed for part in done) == counting.computed == 29, "equal packs are computed once"
    source = OfflineSource(FeatureCache(tmp_path, spec), spec)
    source.want(list(enumerate(packs)))
    for index, pack in enumerate(packs):
        assert equal(source.get(index, pack), ColocatedSource(engine, spec).get(index, pack))


def test_capture_goes_on_where_it_was_killed_and_repairs_damage(spec, engine, packs, tmp_path):
    capture(packs[:6], engine, spec, tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:500])
    counting = FailsOn(engine)
    again = capture(packs[:6], counting, spec, tmp_path)
    assert (again.computed, again.found, counting.computed) == (2, 4, 2)


def test_offline_names_what_is_missing_or_wrong(spec, engine, packs, tmp_path):
    capture(packs[:2], engine, spec, tmp_path)
    source = OfflineSource(FeatureCache(tmp_path, spec), spec)
    with pytest.raises(UserError, match=r"features of pack 7 \(documents rows.jsonl:2.0") as error:
        source.want([(7, packs[2])])
    assert "capture" in error.value.fix
    file = tmp_path / f"{identity(packs[0], spec)}.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match="corrupt"):
        source.get(0, packs[0])


def test_colocated_refuses_what_is_not_finite(spec, engine, packs):
    class Broken:
        def compute(self, input_ids, lengths):
            features = engine.compute(input_ids, lengths)
            final = features.final.clone()
            final[0, 0] = float("nan")
            return Features(features.taps, final)

    with pytest.raises(StreamError, match="not finite"):
        ColocatedSource(Broken(), spec).get(0, packs[0])


def test_colocated_features_can_be_trained_on(spec, engine, packs):
    features = ColocatedSource(engine, spec).get(0, packs[0])
    weight = torch.ones(spec.hidden_size, requires_grad=True)
    (features.final * weight).sum().backward()
    assert weight.grad is not None


def test_build_source_checks_what_it_is_given(spec, store, tmp_path):
    with pytest.raises(UserError, match="token"):
        config = SourceConfig("stream", ledger="http://127.0.0.1:1")
        build_source(config, store, spec, tmp_path, rank=0, session="s", engine=None)
    with pytest.raises(FeatureError):
        FeatureCache(tmp_path, spec).path("x").write_bytes(b"not features")
        pack = Pack((Document(torch.ones(3, dtype=torch.int32).numpy(), torch.ones(3, dtype=torch.bool).numpy()),))
        FeatureCache(tmp_path, spec).read(pack, "x")
