"""The plan is a pure function, and every document is in it exactly once an epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines.documents import Document, Documents, DocumentWriter
from data_pipelines.errors import UserError
from data_pipelines.packing import Plan, best_fit, pack_id, position_ids


def documents(lengths) -> Documents:
    made = [Document(np.full(n, i, np.int32), np.ones(n, bool), f"row {i}") for i, n in enumerate(lengths)]
    return Documents.gather(made)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 32), min_size=1, max_size=80), st.integers(0, 5), st.integers(1, 3))
def test_each_epoch_holds_every_document_once_in_packs_that_fit(lengths, seed, epochs):
    plan = Plan(documents(lengths), pack_tokens=32, seed=seed, epochs=epochs)
    again = Plan(documents(lengths), pack_tokens=32, seed=seed, epochs=epochs)
    assert plan.fingerprint == again.fingerprint
    per_epoch = len(plan) // epochs
    for epoch in range(epochs):
        packs = [plan[epoch * per_epoch + i] for i in range(per_epoch)]
        assert all(len(p) <= 32 for p in packs)
        assert sorted(o for p in packs for o in p.origins) == sorted(f"row {i}" for i in range(len(lengths)))
        for i, pack in enumerate(packs):
            assert again[epoch * per_epoch + i].origins == pack.origins


def test_another_seed_is_another_plan_and_another_epoch_another_order():
    docs = documents([5] * 40)
    a, b = (Plan(docs, pack_tokens=16, seed=s, epochs=2) for s in (0, 1))
    assert a.fingerprint != b.fingerprint
    half = len(a) // 2
    orders = [[tuple(a[e * half + i].origins) for i in range(half)] for e in (0, 1)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(1, 5), st.integers(0, 30))
def test_ranks_share_out_every_index_once(start, world_size, length):
    plan = Plan(documents([1]), pack_tokens=4, seed=0, epochs=100)
    shares = [list(plan.share(r, world_size, start, start + length)) for r in range(world_size)]
    assert sorted(i for s in shares for i in s) == list(range(start, start + length))
    assert all(i % world_size == r for r, s in enumerate(shares) for i in s)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=300))
def test_best_fit_is_never_worse_than_half_empty_and_stays_in_order(lengths):
    chosen = best_fit(lengths, 64)
    filled = np.bincount(chosen, weights=lengths)
    assert filled.max() <= 64 and filled.min() > 0  # no pack is skipped
    # Any two packs of one window together hold more than one pack's room: else the later one would have been spared.
    if len(filled) > 1:
        assert np.sort(filled)[:2].sum() > 64


def test_packs_are_nearly_full_and_only_so_many_stay_open():
    draw = np.random.default_rng(0)
    short, long = (draw.lognormal(mean, 0.8, 20_000).clip(8, 2048).astype(int).tolist() for mean in (5, 6.5))
    for lengths, least in ((short, 0.999), (long, 0.998), (draw.integers(400, 1500, 20_000).tolist(), 0.99)):
        chosen = best_fit(lengths, 2048)
        assert sum(lengths) / (2048 * (chosen.max() + 1)) > least
    # A window's documents lie in packs that were open then: it streams.
    last, packs = -1, 0
    for start in range(0, len(lengths), 4096):
        window = chosen[start : start + 4096]
        assert len({p for p in window if p <= last}) <= 4096
        last, packs = max(last, int(window.max())), packs + 1
    assert packs == 5


def test_a_plan_is_the_same_from_memory_and_from_files_and_depends_on_every_label(tmp_path):
    docs = documents([5, 9, 3, 12, 7])
    writer = DocumentWriter(tmp_path)
    for part in ([docs[0], docs[1]], [], [docs[2], docs[3], docs[4]]):
        writer.append(Documents.gather(part))
    writer.close()
    mapped = Documents.load(tmp_path)
    a, b = (Plan(d, pack_tokens=16, seed=3, epochs=2) for d in (docs, mapped))
    assert a.fingerprint == b.fingerprint
    assert [p.origins for p in a] == [p.origins for p in b]
    assert all(np.array_equal(p.input_ids, q.input_ids) for p, q in zip(a, b))
    assert np.array_equal(docs.label_counts, mapped.label_counts)
    other = documents([5, 9, 3, 12, 7])
    other.loss_mask[6] = False
    assert Plan(other, pack_tokens=16, seed=3, epochs=2).fingerprint != a.fingerprint


def test_pack_ids_tell_apart_what_gives_other_features():
    ids = np.arange(6, dtype=np.int32)
    base = pack_id(ids, (2, 4), "spec")
    assert base == pack_id(ids.copy(), (2, 4), "spec")
    assert len({base, pack_id(ids, (3, 3), "spec"), pack_id(ids + 1, (2, 4), "spec"), pack_id(ids, (2, 4), "x")}) == 4


def test_positions_restart_at_documents():
    assert position_ids((2, 1, 3)).tolist() == [0, 1, 0, 0, 1, 2]


def test_refusals():
    with pytest.raises(UserError, match="no document"):
        Plan(documents([]), pack_tokens=8, seed=0)
    with pytest.raises(UserError, match="9 tokens does not fit"):
        Plan(documents([9]), pack_tokens=8, seed=0)
