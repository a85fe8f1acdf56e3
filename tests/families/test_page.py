"""The table of families in the docs leaves none out, and what is wrong would be seen."""

from __future__ import annotations

import pytest
import torch

from tests.families.build import all_families, save
from tests.families.page import documented
from tests.families.proof import prove


def test_every_family_has_its_line():
    if lines := documented():  # written with this version of transformers
        assert set(lines) == {(family.model_type, family.model_class) for family in all_families()}


def test_families_are_those_of_transformers():
    families = {family.model_type for family in all_families()}
    assert {"llama", "granite", "cohere2", "phi", "gemma4_text", "qwen3_5_moe", "mistral3", "qwen2_5_vl"} <= families
    assert len(families) > 200


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save(next(family for family in all_families() if family.model_type == "llama"), folder)
    return folder


def test_the_proof_sees_a_scale_that_is_left_out(llama, monkeypatch):
    prove(llama, tapped=True)
    real = prove.__globals__["own_logits"]
    monkeypatch.setitem(prove.__globals__, "own_logits", lambda model, ids: 1.001 * real(model, ids))
    with pytest.raises(AssertionError):
        prove(llama, tapped=True)


def test_the_proof_sees_a_wrong_tap(llama, monkeypatch):
    real = prove.__globals__["own_hidden_states"]
    monkeypatch.setitem(prove.__globals__, "own_hidden_states", lambda model, ids: real(model, ids)[::-1])
    with pytest.raises(AssertionError):
        prove(llama, tapped=True)


def test_the_proof_sees_a_model_that_is_not_causal(llama, monkeypatch):
    real = prove.__globals__["own_logits"]

    def looks_ahead(model, ids):
        logits = real(model, ids)
        return logits + torch.flip(logits, (0,))

    monkeypatch.setitem(prove.__globals__, "own_logits", looks_ahead)
    with pytest.raises(AssertionError, match="come later"):
        prove(llama, tapped=True)
