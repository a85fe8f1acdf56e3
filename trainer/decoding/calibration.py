"""Sequential temperature scaling of a drafter's confidence, and how well a confidence fits what happened.

A drafter that has learnt it gives each draft of a round a logit z_i: how likely it is accepted if the ones before it are.
That drafts 1…k are all accepted then has the probability Π_{i≤k} σ(z_i/T_i). The temperatures are fitted from left to
right: T_k is the one with the least calibration error at position k, given T_1…T_{k-1} (DSpark).

Letters: R rounds, K drafts a round, n rounds in which a draft was judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .chain import Decoded

BINS, LEAST_IN_A_BIN = 15, 20
WIDEST = 16.0  # temperatures are looked for from 1/16 to 16


@dataclass(frozen=True, eq=False)
class Rounds:
    """Decoded rounds. logits: float64 [R, K]. accepted, judged: int64 [R], as in `Decoded`: only a judged draft can be right
    or wrong."""

    logits: Tensor
    accepted: Tensor
    judged: Tensor

    @classmethod
    def of(cls, texts: Sequence[Decoded]) -> Rounds:
        """All rounds of these texts, decoded with a drafter that has a confidence."""
        logits = [logits for text in texts for logits in text.confidence]
        accepted = torch.tensor([count for text in texts for count in text.accepted], dtype=torch.long)
        judged = torch.tensor([count for text in texts for count in text.judged], dtype=torch.long)
        return cls(torch.tensor(logits, dtype=torch.double), accepted, judged)

    def position(self, k: int) -> tuple[Tensor, Tensor]:
        """Which rounds have their k-th draft judged, bool [R], and in which of those drafts 1…k were accepted, bool [n]."""
        judged = self.judged >= k
        return judged, self.accepted[judged] >= k


def fit_temperatures(rounds: Rounds) -> list[float]:
    """T_1…T_K. Where several are equally good it is the one nearest to 1."""
    temperatures: list[float] = []
    survival = torch.ones(len(rounds.logits), dtype=torch.double)
    for k, logits in enumerate(rounds.logits.unbind(1), start=1):
        judged, right = rounds.position(k)

        def error(temperature: float, before=survival[judged], logits=logits[judged], right=right) -> float:
            return calibration_error(before * torch.sigmoid(logits / temperature), right)

        temperatures.append(_least(error))
        survival = survival * torch.sigmoid(logits / temperatures[-1])
    return temperatures


def describe(rounds: Rounds, temperatures: Sequence[float]) -> list[dict[str, Any]]:
    """Per position k: `rounds` (in which draft k was judged), `accepted` (in what share of them drafts 1…k were), and of the
    probability that the drafter gives to that: its mean (`confidence`) and `ece`, `brier`, `auc`."""
    survival = torch.sigmoid(rounds.logits / torch.tensor(temperatures, dtype=torch.double)).cumprod(1)
    positions = []
    for k in range(1, len(temperatures) + 1):
        judged, right = rounds.position(k)
        confidence = survival[judged, k - 1]
        positions.append(
            {
                "rounds": len(right),
                "accepted": float(right.double().mean()),
                "confidence": float(confidence.mean()),
                "ece": calibration_error(confidence, right),
                "brier": brier_score(confidence, right),
                "auc": area_under_curve(confidence, right),
            }
        )
    return positions


def calibration_error(confidence: Tensor, right: Tensor) -> float:
    """Expected calibration error: the mean over bins of |mean confidence − share that was right|.

    confidence: float64 [n]; right: bool [n]. The bins have equal mass (the same number of rounds each, in the order of
    their confidence): 15 of them, or as many as leave 20 rounds in each.
    """
    gaps = (confidence - right.double())[confidence.argsort(stable=True)]
    bins = max(1, min(BINS, len(gaps) // LEAST_IN_A_BIN))
    return float(sum(part.sum().abs() for part in gaps.tensor_split(bins)) / len(gaps))


def brier_score(confidence: Tensor, right: Tensor) -> float:
    """The mean squared distance between what was foreseen and what happened."""
    return float((confidence - right.double()).square().mean())


def area_under_curve(confidence: Tensor, right: Tensor) -> float | None:
    """How often an accepted round has a higher confidence than a rejected one, a tie counting half; None when all rounds
    went the same way."""
    wrong = confidence[~right].sort().values
    if not len(wrong) or len(wrong) == len(right):
        return None
    below = torch.searchsorted(wrong, confidence[right], right=False)
    not_above = torch.searchsorted(wrong, confidence[right], right=True)
    return float((below + not_above).double().mean() / 2 / len(wrong))


def _least(error: Callable[[float], float]) -> float:
    """A temperature with the least error: on a logarithmic grid, then on finer ones around the best. (The error is a sum of
    absolute values over bins: it has no useful gradient.)"""
    best, reach = 0.0, math.log(WIDEST)
    for _ in range(3):
        grid = [best + reach * i / 20 for i in range(-20, 21)]
        inside = [x for x in grid if abs(x) <= math.log(WIDEST) + 1e-9]
        best = min(sorted(inside, key=abs), key=lambda x: error(math.exp(x)))  # the first of equals
        reach /= 10
    return math.exp(best)
