"""The losses over (p, q), by name, and the streaming teacher that computes any mixture of them in chunks.

p is the target's distribution, q the drafter's. Gradients are made in the forward, chunk by chunk: dL/dh is stored instead
of logits, and nothing of size [rows, vocabulary] lives. The teacher's distribution of a position is made once and serves
every draft step that predicts from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from data_pipelines.engines.readout import Readout
from data_pipelines.errors import UserError

from .target import FrozenTarget

CHUNK_ELEMENTS = 1 << 22  # of one [entries, vocabulary] block: 16 MiB in fp32


def upcast(x: torch.Tensor) -> torch.Tensor:
    """At least fp32; float64 stays, for the tests."""
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True, eq=False)
class Pair:
    """n entries over the draft vocabulary, all [n, D] but labels.

    p: the target's distribution renormalised on the draft vocabulary; p_full: not renormalised, so that what lies outside
    counts as missed. log_q, q: the drafter's. labels int64 [n]: index of the label in the draft vocabulary, or -1.
    """

    p: torch.Tensor
    p_full: torch.Tensor
    log_q: torch.Tensor
    labels: torch.Tensor

    @property
    def q(self) -> torch.Tensor:
        return self.log_q.exp()

    @property
    def overlap(self) -> torch.Tensor:
        """Σ_v min(p_v, q_v) [n]: the probability that a draft sampled from q is accepted."""
        return torch.minimum(self.p_full, self.q).sum(-1)


def _ce(pair: Pair) -> torch.Tensor:
    """A label outside the draft vocabulary cannot be drafted: it teaches nothing."""
    right = -pair.log_q.gather(1, pair.labels.clamp(min=0)[:, None]).squeeze(1)
    return torch.where(pair.labels >= 0, right, 0.0)


def _kl(p: torch.Tensor, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return (p * (log_p - log_q)).sum(-1)


def _log(p: torch.Tensor) -> torch.Tensor:
    return p.clamp(min=torch.finfo(p.dtype).tiny).log()


def _jsd(pair: Pair) -> torch.Tensor:
    middle = (pair.p + pair.q) / 2
    return (_kl(pair.p, _log(pair.p), _log(middle)) + _kl(pair.q, pair.log_q, _log(middle))) / 2


def _lk_hybrid(pair: Pair) -> torch.Tensor:
    """λ·kl + (1−λ)·tv, λ = exp(−3 Σ min(p, q)) of each token by itself, detached."""
    mix = torch.exp(-3 * pair.overlap.detach())
    return mix * LOSSES["kl"](pair) + (1 - mix) * LOSSES["tv"](pair)


LOSSES: dict[str, Callable[[Pair], torch.Tensor]] = {
    "ce": _ce,
    "soft_ce": lambda pair: -(pair.p * pair.log_q).sum(-1),
    "kl": lambda pair: _kl(pair.p, _log(pair.p), pair.log_q),
    "reverse_kl": lambda pair: _kl(pair.q, pair.log_q, _log(pair.p)),
    "jsd": _jsd,
    "tv": lambda pair: 1 - pair.overlap,
    "l1": lambda pair: 2 * (1 - pair.overlap),
    "nla": lambda pair: -_log(pair.overlap),
    "lk_hybrid": _lk_hybrid,
}


@dataclass(frozen=True)
class Mixture:
    """A weighted sum of named losses, written as in a recipe: `0.1*ce + 0.9*l1`."""

    terms: tuple[tuple[float, str], ...]

    @classmethod
    def parse(cls, text: str) -> Mixture:
        terms = []
        for term in text.split("+"):
            weight, _, name = term.rpartition("*")
            try:
                terms.append((float(weight or 1), name.strip()))
            except ValueError:
                raise UserError(
                    f"drafter.loss: '{weight}' is not a number", fix="write it like 0.1*ce + 0.9*l1"
                ) from None
            if terms[-1][1] not in LOSSES:
                raise UserError(f"drafter.loss: there is no loss '{name.strip()}'", fix=f"losses: {', '.join(LOSSES)}")
        return cls(tuple(terms))

    def __call__(self, pair: Pair) -> torch.Tensor:
        return sum(weight * LOSSES[name](pair) for weight, name in self.terms)


@dataclass(frozen=True, eq=False)
class Teacher:
    """The target's side of one pack. normed: g [T, H]. argmax int64 [T] and logsumexp [T] are over the whole vocabulary;
    they are made only for the rows that some label's distribution comes from, and are 0 elsewhere."""

    normed: torch.Tensor
    argmax: torch.Tensor
    logsumexp: torch.Tensor


@torch.no_grad()
def summarise_teacher(frozen: FrozenTarget, final: torch.Tensor, needed: torch.Tensor) -> Teacher:
    """final: H^L [T, H]. needed: bool [T], the rows that some label's distribution comes from."""
    normed = frozen.normed(final)
    argmax = torch.zeros(len(final), dtype=torch.long, device=final.device)
    logsumexp = upcast(final.new_zeros(len(final)))
    rows = needed.nonzero().squeeze(1)
    for chunk in rows.split(max(1, CHUNK_ELEMENTS // frozen.head_weight.shape[0])):
        logits = frozen.readout.logits(normed[chunk])
        argmax[chunk] = logits.argmax(-1)
        # The same as logits.logsumexp(-1), from a fused kernel: half the time on a CPU.
        logsumexp[chunk] = logits[:, 0] - logits.log_softmax(-1)[:, 0]
    return Teacher(normed, argmax, logsumexp)


@dataclass(frozen=True, eq=False)
class Judged:
    """Per draft, in the order of the entries, without gradient: the loss [N], the drafter's argmax as an index into the
    draft vocabulary [N], and the expected acceptance Σ_v min(p_v, q_v) against the full-vocabulary teacher [N]."""

    loss: torch.Tensor
    argmax: torch.Tensor
    expected_acceptance: torch.Tensor


def streamed_loss(
    mixture: Mixture,
    hidden: torch.Tensor,
    head: torch.Tensor,
    *,
    teacher: Teacher,
    teacher_readout: Readout,
    teacher_rows: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, Judged]:
    """Σ_n weights_n · mixture(p_n, softmax(head · hidden_n)), and what each draft was worth.

    hidden [N, H']: normed draft states. head [D, H']: the drafter's. A drafter's logits are the plain product, as engines
    compute them; scale, bias and soft-cap are the target's alone. teacher_readout: of the draft vocabulary [D, H].
    teacher_rows int64 [N]: the row of `teacher` whose distribution entry n is to match. labels int64 [N]: in the draft
    vocabulary, or -1. weights [N]. Differentiable in `hidden` and `head`.
    """
    order = teacher_rows.argsort(stable=True)
    loss, *judged = _StreamedLoss.apply(
        hidden[order],
        head,
        mixture,
        teacher.normed,
        teacher.logsumexp,
        teacher_readout,
        teacher_rows[order],
        labels[order],
        weights[order],
    )
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return loss, Judged(*(value[back] for value in judged))


class _StreamedLoss(torch.autograd.Function):
    """Entries come sorted by teacher row, so that a chunk of entries needs each teacher row once."""

    @staticmethod
    def forward(ctx, hidden, head, mixture, normed, logsumexp, teacher_readout, rows, labels, weights):
        wide, size = upcast(hidden).dtype, len(hidden)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        losses = torch.zeros(size, dtype=wide, device=hidden.device)
        expected = torch.zeros_like(losses)
        argmax = torch.zeros(size, dtype=torch.long, device=hidden.device)
        grad_hidden = torch.zeros_like(hidden)
        grad_head = torch.zeros(head.shape, dtype=wide, device=head.device) if ctx.needs_input_grad[1] else None
        for start in range(0, size, step := max(1, CHUNK_ELEMENTS // head.shape[0])):
            chunk = slice(start, min(size, start + step))
            wanted, position = rows[chunk].unique_consecutive(return_inverse=True)
            p_logits = teacher_readout.logits(normed[wanted])
            p, p_full = p_logits.softmax(-1)[position], (p_logits - logsumexp[wanted, None]).exp()[position]
            logits = upcast(hidden[chunk] @ head.T)
            argmax[chunk] = logits.argmax(-1)
            with torch.enable_grad():
                logits.requires_grad_()
                pair = Pair(p, p_full, logits.log_softmax(-1), labels[chunk])
                value = mixture(pair)
                weighted = (value * weights[chunk].to(wide)).sum()
                (grad_logits,) = torch.autograd.grad(weighted, logits)
            loss += weighted.detach()
            losses[chunk] = value.detach()
            expected[chunk] = pair.overlap.detach()
            narrow = grad_logits.to(hidden.dtype)
            grad_hidden[chunk] = narrow @ head
            if grad_head is not None:
                grad_head += (narrow.T @ hidden[chunk]).to(wide)
        ctx.save_for_backward(grad_hidden, grad_head if grad_head is None else grad_head.to(head.dtype))
        ctx.mark_non_differentiable(losses, argmax, expected)
        return loss, losses, argmax, expected

    @staticmethod
    def backward(ctx, grad_loss, *_):
        grad_hidden, grad_head = ctx.saved_tensors
        scaled = None if grad_head is None else grad_head * grad_loss.to(grad_head.dtype)
        return grad_hidden * grad_loss.to(grad_hidden.dtype), scaled, *[None] * 7
