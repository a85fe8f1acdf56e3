"""Is a whole target what this project takes it for? Compared with the model's own forward, one way for every family.

Each finding says what was compared, by how much the two differ and how much is allowed. A difference is the largest one, as
a share of the largest entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import UserError, first_line
from .anatomy import anatomy, tap_hidden_states, text_config
from .readout import error_limit, measure_readout, random_tokens, relative_error

_TOKENS = 12


@dataclass(frozen=True)
class Finding:
    """difference, limit: None where nothing was compared. says: what was found, for a person."""

    name: str
    fits: bool
    says: str
    difference: float | None = None
    limit: float | None = None


@torch.no_grad()
def probe(model: nn.Module) -> list[Finding]:
    """logits, taps and embedding of a whole target. (Whether packed documents keep apart is the engine's to find out.)"""
    checks = {"logits": probe_logits, "taps": probe_taps, "embedding": probe_embedding}
    return [guarded(name, check, model) for name, check in checks.items()]


def guarded(name: str, check: Callable[..., Finding], *arguments) -> Finding:
    """The finding of a check; one that does not fit where the family's own code fails at it."""
    try:
        return check(*arguments)
    except UserError as error:
        return Finding(name, False, error.what)
    except Exception as error:  # anything may come out of some 200 families' code
        return Finding(name, False, f"cannot be computed: {type(error).__name__}: {first_line(error)}")


def refuse_misfits(model: nn.Module, findings: list[Finding], *, tapped: bool) -> None:
    """Raises UserError, with the family's name and the figures, unless all fit. tapped: whether taps are read."""
    if wrong := [finding for finding in findings if not finding.fits and (tapped or finding.name != "taps")]:
        raise UserError(
            f"this {text_config(model.config).model_type} target ({type(model).__name__}) cannot be trained for exactly: "
            + "; ".join(f"{finding.name}: {finding.says}" for finding in wrong),
            fix="draftsmith check-target shows every comparison; another family of targets may fit",
        )


def probe_logits(model: nn.Module) -> Finding:
    readout, error = measure_readout(model)
    limit = error_limit(readout.weight.dtype)
    tail = [f"scale {readout.scale:g}"] if readout.scale != 1 else []
    tail += ["bias"] if readout.bias is not None else []
    tail += [f"soft-cap {readout.softcap:g}"] if readout.softcap is not None else []
    carried = f" (carried: {', '.join(tail)})" if tail else ""
    if (seen := _later_tokens_seen(model)) > limit:
        return Finding(
            "logits", False, f"those of a token change by {seen:.2g} with later tokens: not causal", seen, limit
        )
    if error <= limit:
        return Finding("logits", True, f"the head of the normed final state{carried}", error, limit)
    return Finding(
        "logits", False, f"off by {error:.2g} of the largest from the head of the normed final state", error, limit
    )


def _later_tokens_seen(model: nn.Module) -> float:
    """How much other later tokens change a token's logits: the median over the earlier tokens, of which rounding may send
    one to another expert."""
    half = _TOKENS // 2
    ids, others = random_tokens(model, _TOKENS, seed=5), random_tokens(model, half, seed=6)
    texts = (ids, torch.cat([ids[:, :half], others], dim=1))
    one, other = (model(input_ids=text, use_cache=False).logits[0, :half].float() for text in texts)
    return float((one - other).abs().amax(-1).median() / one.abs().max().clamp(min=1e-12))


def probe_taps(model: nn.Module) -> Finding:
    """The recorded H^k against transformers' own `hidden_states`, whose last entry is normed."""
    parts, ids = anatomy(model), random_tokens(model, _TOKENS, seed=1)
    depth = len(parts.layers)
    with tap_hidden_states(model, tuple(range(depth + 1))) as recorder:
        states = parts.decoder(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    ours, limit = [recorder.state(k).float() for k in range(depth + 1)], error_limit(recorder.final.dtype)
    if odd := [k for k, state in enumerate(ours) if state.shape != recorder.final.shape]:
        shape = "×".join(map(str, ours[odd[0]].shape[2:]))
        return Finding("taps", False, f"the state after layer {odd[0]} is {shape} numbers a token, not one vector")
    if not states or len(states) not in (depth, depth + 1):
        return Finding("taps", True, "recorded at the inputs of the layers; transformers gives none to compare with")
    theirs = [state.float() for state in states]
    normed = parts.final_norm(recorder.final).float()
    inner = [relative_error(a, b) for a, b in zip(ours[:-1], theirs)]
    late = [relative_error(a, b) for a, b in zip(ours[1:-1], theirs)]
    if max(inner) > limit and max(late, default=0.0) <= limit:  # Mamba's list begins after the first layer
        return Finding(
            "taps", True, "equal transformers' hidden states, which leave out the embedding", max(late), limit
        )
    last = min(relative_error(x, theirs[-1]) for x in (normed, ours[-1])) if len(theirs) > depth else 0.0
    errors = [*inner, last]
    worst = max(range(len(errors)), key=errors.__getitem__)
    if errors[worst] <= limit:
        return Finding("taps", True, f"equal transformers' hidden states of all {depth} layers", errors[worst], limit)
    says = f"the state after layer {worst} differs from transformers' by {errors[worst]:.2g}"
    return Finding("taps", False, says, errors[worst], limit)


def probe_embedding(model: nn.Module) -> Finding:
    """What the first layer reads against the plain rows, which drafters and engines embed with."""
    parts, ids = anatomy(model), random_tokens(model, _TOKENS, seed=2)
    with tap_hidden_states(model, (0,)) as recorder:
        parts.decoder(input_ids=ids, use_cache=False)
    first, rows = recorder.state(0)[0].float(), parts.embedding.weight[ids[0]].float()
    if rows.shape != recorder.final.shape[1:]:
        return Finding("embedding", False, f"its rows have {rows.shape[-1]} numbers, states {recorder.final.shape[-1]}")
    if first.shape != rows.shape:
        return Finding("embedding", True, "drafters embed the plain rows; this model spreads them over several streams")
    factor = float((first * rows).sum() / rows.square().sum().clamp(min=1e-12))
    if relative_error(rows, first) <= error_limit(recorder.final.dtype):
        return Finding("embedding", True, "drafters embed the plain rows, as this model does")
    if relative_error(rows * factor, first) <= error_limit(recorder.final.dtype):
        return Finding("embedding", True, f"drafters embed the plain rows; this model multiplies them by {factor:.4g}")
    return Finding("embedding", True, "drafters embed the plain rows; this model adds to them (positions, a norm)")
