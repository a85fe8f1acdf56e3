"""The streaming teacher: soft-target cross-entropy whose gradients are made in the forward, chunk by chunk.

Nothing of size [rows, vocabulary] lives: the teacher's distribution of a chunk of positions is made once, serves every
draft step that predicts from it, and is gone. dL/dh is stored instead of logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .target import FrozenTarget

CHUNK_ELEMENTS = 1 << 22  # of one [entries, vocabulary] block: 16 MiB in fp32


def upcast(x: torch.Tensor) -> torch.Tensor:
    """At least fp32; float64 stays, for the tests."""
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True, eq=False)
class Teacher:
    """The target's side of one pack. normed: g [T, H]. argmax int64 [T] and logsumexp [T] are over the whole vocabulary;
    they are made only for the rows of `needed` and are 0 elsewhere."""

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
        logits = upcast(frozen.cap(normed[chunk] @ frozen.head_weight.T))
        argmax[chunk] = logits.argmax(-1)
        logsumexp[chunk] = logits.logsumexp(-1)
    return Teacher(normed, argmax, logsumexp)


@dataclass(frozen=True, eq=False)
class Judged:
    """Per draft, in the order of the entries, without gradient: cross-entropy [N], the drafter's argmax as an index into
    the draft vocabulary [N], and the expected acceptance Σ_v min(p_v, q_v) against the full-vocabulary teacher [N]."""

    cross_entropy: torch.Tensor
    argmax: torch.Tensor
    expected_acceptance: torch.Tensor


def soft_cross_entropy(
    hidden: torch.Tensor,
    head: torch.Tensor,
    *,
    teacher: Teacher,
    teacher_head: torch.Tensor,
    teacher_rows: torch.Tensor,
    weights: torch.Tensor,
    cap,
) -> tuple[torch.Tensor, Judged]:
    """Σ_n weights_n · CE(p_n restricted to the draft vocabulary, softmax(head · hidden_n)), and what each draft was worth.

    hidden [N, H]: normed draft states. head [D, H]: the drafter's. teacher_head [D, H]: the target's rows of the draft
    vocabulary. teacher_rows int64 [N]: the row of `teacher` whose distribution entry n is to match. weights [N]. cap: the
    target's soft-cap, applied to both sides.
    Differentiable in `hidden` and `head`.
    """
    order = teacher_rows.argsort(stable=True)
    loss, *judged = _SoftCrossEntropy.apply(
        hidden[order],
        head,
        teacher.normed,
        teacher.logsumexp,
        teacher_head,
        teacher_rows[order],
        weights[order],
        cap,
    )
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return loss, Judged(*(value[back] for value in judged))


class _SoftCrossEntropy(torch.autograd.Function):
    """Entries come sorted by teacher row, so that a chunk of entries needs a contiguous run of teacher rows."""

    @staticmethod
    def forward(ctx, hidden, head, normed, logsumexp, teacher_head, rows, weights, cap):
        wide = upcast(hidden).dtype
        size = len(hidden)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        cross_entropy = torch.zeros(size, dtype=wide, device=hidden.device)
        expected = torch.zeros_like(cross_entropy)
        argmax = torch.zeros(size, dtype=torch.long, device=hidden.device)
        grad_hidden = torch.zeros_like(hidden)
        grad_head = torch.zeros(head.shape, dtype=wide, device=head.device) if ctx.needs_input_grad[1] else None
        capped = cap(torch.ones(())) != 1  # is there a soft-cap at all?
        for start in range(0, size, step := max(1, CHUNK_ELEMENTS // head.shape[0])):
            chunk = slice(start, min(size, start + step))
            wanted, position = rows[chunk].unique_consecutive(return_inverse=True)
            p_logits = upcast(cap(normed[wanted] @ teacher_head.T))
            p = p_logits.softmax(-1)[position]
            q_logits = upcast(hidden[chunk] @ head.T)
            if capped:
                slope = q_logits  # d cap(x)/dx, by autograd on the elementwise function below
                with torch.enable_grad():
                    slope = q_logits.detach().requires_grad_()
                    value = cap(slope)
                    (slope,) = torch.autograd.grad(value.sum(), slope)
                q_logits = value.detach()
            log_q = q_logits.log_softmax(-1)
            argmax[chunk] = q_logits.argmax(-1)
            cross_entropy[chunk] = -(p * log_q).sum(-1)
            q = log_q.exp_()
            full = (p_logits - logsumexp[wanted, None]).exp_()[position]  # p over the whole vocabulary, on the draft's
            expected[chunk] = torch.minimum(full, q).sum(-1)
            weight = weights[chunk, None].to(wide)
            loss += (weight.squeeze(1) * cross_entropy[chunk]).sum()
            grad_logits = (q - p) * weight
            if capped:
                grad_logits *= slope
            narrow = grad_logits.to(hidden.dtype)
            grad_hidden[chunk] = narrow @ head
            if grad_head is not None:
                grad_head += (narrow.T @ hidden[chunk]).to(wide)
        ctx.save_for_backward(grad_hidden, grad_head if grad_head is None else grad_head.to(head.dtype))
        ctx.mark_non_differentiable(cross_entropy, argmax, expected)
        return loss, cross_entropy, argmax, expected

    @staticmethod
    def backward(ctx, grad_loss, *_):
        grad_hidden, grad_head = ctx.saved_tensors
        scaled = None if grad_head is None else grad_head * grad_loss.to(grad_head.dtype)
        return grad_hidden * grad_loss.to(grad_hidden.dtype), scaled, None, None, None, None, None, None
