"""Acceptance in numbers, from decoded texts. Everything here is a ratio of counts, `None` where nothing was counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .chain import Decoded


def acceptance(decoded: Sequence[Decoded], draft_tokens: int) -> dict[str, Any]:
    """What the drafter achieved on these texts, decoded with a chain of `draft_tokens` drafts a round.

    acceptance_length: tokens committed by rounds (accepted drafts and the target's own next token, the "bonus") per
    target forward, the prefill and its token excluded: micro over rounds, so a perfect drafter comes to
    draft_tokens + 1 and a useless one to exactly 1. A last round that meets the end of the text commits only what the
    text takes; on short texts this holds the number down a little, as it does in an engine.
    acceptance_length_mean: the same per prompt, then the mean over prompts that had a round.
    prefix_rate[j - 1]: of the rounds in which draft j was judged, the share in which drafts 1…j were all accepted.
    conditional_rate[j - 1]: the same share of those rounds in which drafts 1…j-1 had been accepted.
    Draft j of a round is judged if the text has a token in its place: past an end of sequence or the last of
    max_new_tokens plain decoding writes nothing, and a draft there is neither right nor wrong. (Which places those are
    is known from the finished text also for drafts behind a rejection, so that no rate is conditioned on acceptance.)
    """
    committed = [max(len(d.tokens) - 1, 0) for d in decoded]
    lengths = [c / d.rounds for c, d in zip(committed, decoded) if d.rounds]
    rounds = [(a, j) for d in decoded for a, j in zip(d.accepted, d.judged)]
    prefix, conditional = [], []
    for j in range(1, draft_tokens + 1):
        right = sum(accepted >= j for accepted, _ in rounds)
        prefix.append(_ratio(right, sum(judged >= j for _, judged in rounds)))
        conditional.append(_ratio(right, sum(judged >= j and accepted >= j - 1 for accepted, judged in rounds)))
    return {
        "acceptance_length": _ratio(sum(committed), len(rounds)),
        "acceptance_length_mean": _ratio(sum(lengths), len(lengths)),
        "prefix_rate": prefix,
        "conditional_rate": conditional,
        "prompts": len(decoded),
        "rounds": len(rounds),
        "tokens": sum(len(d.tokens) for d in decoded),
    }


def first_difference(expected: Decoded, got: Decoded) -> dict[str, Any] | None:
    """Where a text leaves the reference, or None if it does not.

    position: of the first token that differs. logit_gap: the reference's highest logit minus its second one there; a
    gap near the arithmetic's precision (1e-5 or so in float32) is a tie that rounding decides, a larger one is a bug.
    """
    if expected.tokens == got.tokens:
        return None
    pairs = zip(expected.tokens, got.tokens)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected.tokens), len(got.tokens)))

    def at(values: list) -> Any:
        return values[position] if position < len(values) else None

    return {
        "position": position,
        "expected": at(expected.tokens),
        "got": at(got.tokens),
        "logit_gap": at(expected.margins),
    }


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
