"""The fit and the scores, on rounds whose law is known."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.decoding.calibration import (
    Rounds,
    area_under_curve,
    brier_score,
    calibration_error,
    describe,
    fit_temperatures,
)
from trainer.decoding.chain import Decoded

TRUE = [2.0, 0.5, 1.0, 4.0]


def synthetic(count: int, temperatures: list[float], seed: int) -> Rounds:
    """Draft i of a round is accepted with probability σ(z_i/T_i), if the drafts before it are. A tenth of the rounds meets
    the end of its text."""
    generator = torch.Generator().manual_seed(seed)
    shape = count, len(temperatures)
    logits = 1.0 + 3.0 * torch.randn(shape, generator=generator, dtype=torch.double)
    probs = torch.sigmoid(logits / torch.tensor(temperatures, dtype=torch.double))
    right = torch.rand(shape, generator=generator, dtype=torch.double) < probs
    ends = torch.rand(count, generator=generator) < 0.1
    judged = torch.where(ends, torch.randint(1, shape[1] + 1, (count,), generator=generator), shape[1])
    return Rounds(logits, torch.minimum(right.long().cumprod(1).sum(1), judged), judged)


def test_finds_the_temperatures():
    fitted, held_out = (synthetic(20_000, TRUE, seed) for seed in (0, 1))
    temperatures = fit_temperatures(fitted)
    for found, true in zip(temperatures, TRUE):
        assert abs(math.log(found / true)) < math.log(1.15), temperatures
    before, after = describe(held_out, [1.0] * 4), describe(held_out, temperatures)
    for k, (b, a) in enumerate(zip(before, after)):
        assert a["ece"] < 0.02 and abs(a["confidence"] - a["accepted"]) < 0.02
        assert a["accepted"] == b["accepted"] and a["rounds"] == b["rounds"] <= 20_000
        if TRUE[k] != 1.0:  # (at position 3 what came before is what was wrong)
            assert a["ece"] < b["ece"] / 2 and a["brier"] < b["brier"]
    assert after[0]["auc"] == before[0]["auc"]  # one temperature for all leaves the order as it is
    assert after[3]["auc"] > before[3]["auc"]  # in a product it does not
    assert before[0]["rounds"] > before[3]["rounds"]


def test_what_is_calibrated_stays():
    temperatures = fit_temperatures(synthetic(20_000, [1.0] * 3, 2))
    assert all(abs(math.log(t)) < math.log(1.1) for t in temperatures), temperatures


def test_only_judged_drafts_count():
    """A draft behind the end of a text is neither accepted nor rejected: counted as rejected it would drag T up."""
    rounds = synthetic(5_000, TRUE, 3)
    some = rounds.judged < 4
    rounds.logits[some, 3] = 50.0
    assert fit_temperatures(rounds) == fit_temperatures(
        Rounds(torch.where(rounds.logits == 50.0, -50.0, rounds.logits), rounds.accepted, rounds.judged)
    )


def test_no_reason_to_move():
    """Every draft accepted, and foreseen without doubt: all temperatures below some bound are as good, 1 among them."""
    rounds = Rounds(torch.full((100, 2), 800.0).double(), torch.full((100,), 2), torch.full((100,), 2))
    assert fit_temperatures(rounds) == [1.0, 1.0]


def test_scores_by_hand():
    confidence = torch.tensor([0.9, 0.2, 0.8, 0.2], dtype=torch.double)
    right = torch.tensor([True, False, False, True])
    # Few rounds are one bin: |mean confidence − share right|.
    assert calibration_error(confidence, right) == pytest.approx(abs(2.1 - 2) / 4)
    assert brier_score(confidence, right) == pytest.approx((0.01 + 0.04 + 0.64 + 0.64) / 4)
    # Pairs (accepted, rejected): 0.9 beats both; 0.2 ties with 0.2 and loses to 0.8.
    assert area_under_curve(confidence, right) == pytest.approx((1 + 1 + 0.5 + 0) / 4)
    assert area_under_curve(confidence, torch.ones(4).bool()) is None
    assert area_under_curve(confidence, torch.zeros(4).bool()) is None


def test_bins_have_equal_mass():
    """40 rounds are two bins of 20, whatever their confidences: errors of opposite sign in one bin cancel, across bins they
    do not."""
    confidence = torch.cat([torch.full((20,), 0.5), torch.full((20,), 0.6)]).double()
    right = torch.arange(40) >= 20  # none of the lower half, all of the upper
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert calibration_error(confidence[order], right[order]) == pytest.approx((0.5 + 0.4) / 2)
    assert calibration_error(confidence[10:30], right[10:30]) == pytest.approx(abs(0.55 - 0.5))


def test_rounds_of_texts():
    texts = [
        Decoded(list(range(5)), accepted=[2, 0], judged=[2, 2], confidence=[[1.0, 2.0], [3.0, 4.0]]),
        Decoded([5]),  # ended by its first token: no round
        Decoded(list(range(3)), accepted=[1], judged=[1], confidence=[[5.0, 6.0]]),
    ]
    rounds = Rounds.of(texts)
    assert rounds.logits.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert [rounds.position(1)[0].tolist(), rounds.position(1)[1].tolist()] == [[True] * 3, [True, False, True]]
    assert [rounds.position(2)[0].tolist(), rounds.position(2)[1].tolist()] == [[True, True, False], [True, False]]
