"""Features are verified before they are trained on: every way in which they can be wrong is refused, with its reason."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines.errors import FeatureError
from data_pipelines.features import Features, FeatureSpec, decode, encode, read_metadata

SPEC = FeatureSpec(target="t", taps=(1, 2), hidden_size=8)
IDS, LENGTHS = np.arange(5, dtype=np.int32), (2, 3)


def features(seed: int = 0) -> Features:
    generator = torch.Generator().manual_seed(seed)
    return Features(
        torch.randn(5, 2, 8, generator=generator).bfloat16(), torch.randn(5, 8, generator=generator).bfloat16()
    )


def payload(f: Features | None = None, **changes) -> bytes:
    return encode(f or features(), **{"pack": "p", "input_ids": IDS, "lengths": LENGTHS, "spec": SPEC, **changes})


def read(data: bytes, **changes) -> Features:
    return decode(data, **{"pack": "p", "input_ids": IDS, "lengths": LENGTHS, "spec": SPEC, **changes})


def test_round_trip_is_bit_exact():
    data = payload()
    got = read(data, checksum=read_metadata(data)["checksum"])
    assert torch.equal(got.taps, features().taps) and torch.equal(got.final, features().final)
    assert payload() == data


def test_it_is_a_safetensors_file():
    """That is written and read here, without the library; the library has to agree."""
    tensors = safetensors.torch.load(payload())
    assert torch.equal(tensors["taps"], features().taps) and torch.equal(tensors["final"], features().final)
    assert tensors["input_ids"].tolist() == IDS.tolist() and tensors["document_ids"].tolist() == [0, 0, 1, 1, 1]


def test_without_taps():
    """A drafter may need the final state only."""
    spec, bare = replace(SPEC, taps=()), Features(features().taps[:, :0], features().final)
    got = read(payload(bare, spec=spec), spec=spec)
    assert got.taps.shape == (5, 0, 8) and torch.equal(got.final, bare.final)


def test_what_a_store_gives_is_not_copied():
    received = np.frombuffer(payload(), np.uint8).copy()
    got = read(received.data)
    start = received.ctypes.data
    for tensor in (got.taps, got.final):
        assert start < tensor.data_ptr() < start + received.nbytes


@pytest.mark.parametrize("final", [features().final[:4], features().final.float(), features().final[:, :7]])
def test_features_that_are_not_of_the_spec_are_not_written(final):
    with pytest.raises(FeatureError, match="wanted"):
        payload(Features(features().taps, final))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pack": "q"}, "of pack p, not of q"),
        ({"spec": replace(SPEC, target="other")}, "another target"),
        ({"spec": replace(SPEC, taps=(1, 3))}, "another target, taps"),
        ({"input_ids": IDS + 1}, "other token ids"),
        ({"lengths": (3, 2)}, "another layout"),
        ({"lengths": (2, 2)}, "wanted"),
        ({"checksum": "0"}, "producer reported"),
    ],
)
def test_another_packs_features_are_refused(changes, said):
    with pytest.raises(FeatureError, match=said):
        read(payload(), **changes)


@pytest.mark.parametrize(("value", "said"), [(float("nan"), "finite"), (float("inf"), "finite"), (0.0, "zeros")])
@pytest.mark.parametrize("name", ["taps", "final"])
def test_values_no_target_gives_are_refused(name, value, said):
    broken = features()
    getattr(broken, name)[2:] = value
    with pytest.raises(FeatureError, match=said):
        read(payload(broken))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_flipped_bit_or_cut_is_refused(data):
    whole = payload()
    if data.draw(st.booleans()):
        at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
        broken = bytearray(whole)
        broken[at] ^= 1 << bit
        broken = bytes(broken)
    else:
        broken = whole[: data.draw(st.integers(0, len(whole) - 1))]
    try:
        got = read(broken)
    except FeatureError:
        return
    # A flip in the header's white space or in a key that nobody reads may leave the content whole.
    assert torch.equal(got.taps, features().taps) and torch.equal(got.final, features().final)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_rubbish_is_refused(data):
    with pytest.raises(FeatureError):
        read(data)
