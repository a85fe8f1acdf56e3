"""From sums over drafts to the numbers that a person reads."""

from __future__ import annotations

import torch

from .drafters import Drafter


def summarise(drafter: Drafter, sums: torch.Tensor) -> dict[str, float | list[float | None] | None]:
    """sums [len(drafter.metrics), K], summed over micro-batches and ranks.

    Returns the loss that was trained (None if no draft was), how many drafts count and which share of them was trained
    (those that the draft vocabulary lacks are not), and per step the mean loss of its trained drafts, the *conditional*
    acceptance (step k right given that the earlier ones were), the *prefix* acceptance (all of 0..k right), the expected
    acceptance Σ min(p, q), and the expected acceptance length of a chain, 1 + Σ_k Π_{j≤k} α_j: bonus token included. A
    rate without any draft to judge is None.
    """
    rows = {name: sums[i].tolist() for i, name in enumerate(drafter.metrics)}
    counted, trained = sum(rows["counted"]), sum(rows["trained"])
    divisors = drafter.divisors(torch.tensor(rows["trained"], dtype=torch.double)).tolist()
    rates = {
        "conditional_rate": _ratios(rows["conditional"], rows["reached"]),
        "prefix_rate": _ratios(rows["prefix"], rows["counted"]),
        "expected_rate": _ratios(rows["expected"], rows["counted"]),
    }
    length, product = 1.0, 1.0
    for rate in rates["conditional_rate"]:
        product *= rate or 0.0
        length += product
    loss = sum(w * (x or 0.0) for w, x in zip(drafter.step_weights, _ratios(rows["loss"], divisors)))
    return {
        "loss": loss if trained else None,
        "drafts": int(counted),
        "trained_share": trained / counted if counted else None,
        "loss_per_step": _ratios(rows["loss"], rows["trained"]),
        **rates,
        "expected_length": length,
    }


def _ratios(numerators: list[float], denominators: list[float]) -> list[float | None]:
    return [n / d if d else None for n, d in zip(numerators, denominators)]
