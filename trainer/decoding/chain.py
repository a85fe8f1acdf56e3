"""Greedy speculative decoding of a chain, batched (the greedy case of Leviathan et al. 2023, §2), and plain decoding.

A round: the target holds a text and one *bonus* token that it has not been fed yet; the drafter proposes k tokens; one
target forward over [bonus, drafts] says what the target would have written; drafts are accepted while they are that.
The text is therefore the one that plain greedy decoding writes, whatever the drafter proposes. Plain greedy decoding is
the same loop with zero drafts.

Letters: B prompts, b of them unfinished, T rows of one step, k drafts, A taps, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from data_pipelines.engines.anatomy import length_limit, text_config
from data_pipelines.errors import UserError

from ..drafters.base import Committed, Drafter
from ..target import FrozenTarget
from .judges import cached_target
from .target_cache import TargetStep


@dataclass
class Decoded:
    """What was written for one prompt.

    tokens: the new tokens, the end-of-sequence token included if it came. finish_reason: "stop" (end of sequence) or
    "length" (max_new_tokens, or the context is full). accepted: per round, how many drafts were accepted into the text.
    judged: per round, how many of its k drafts stood where the text has a token; the others can be neither right nor
    wrong, because plain decoding writes nothing there. margins: per token, the target's highest logit minus its second
    one; only from plain decoding. confidence: per round, the logits with which the drafter itself foresaw that each draft is
    accepted; only from one that has learnt to.
    """

    tokens: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    accepted: list[int] = field(default_factory=list)
    judged: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    confidence: list[list[float]] = field(default_factory=list, compare=False)

    @property
    def rounds(self) -> int:
        """Target forwards, the prefill excluded."""
        return len(self.accepted)


def decode_plain(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
    max_context: int | None = None,
) -> list[Decoded]:
    """Plain greedy decoding: the reference. Arguments as in `decode_chain`."""
    return _Decoding(model, prompts, None, None, 0, max_new_tokens, eos_ids, max_context).run()


def decode_chain(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter,
    frozen: FrozenTarget,
    *,
    draft_tokens: int,
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
    max_context: int | None = None,
) -> list[Decoded]:
    """Greedy chain decoding of all prompts in one batch, `draft_tokens` (k ≥ 1) drafted a round.

    prompts: token ids, not empty, at most max_context each (default: the model's `max_position_embeddings`); a text
    never outgrows max_context, and no slot of a block is fed at a position past it.
    Raises UserError on an impossible prompt, and NotJudged for a target that no judge can decode.
    """
    if draft_tokens < 1:
        raise UserError(f"draft_tokens is {draft_tokens}", fix="draft at least 1 token a round")
    return _Decoding(model, prompts, drafter, frozen, draft_tokens, max_new_tokens, eos_ids, max_context).run()


def context_limit(model: nn.Module) -> int | None:
    """The most tokens that a judged text may have, prompt and answer together; None when the config does not say.

    That is what the model can hold, and less for a RoPE whose factors change with the length: kept keys and the keys of
    a new forward would then differ.
    """
    limits = (getattr(text_config(model.config), "max_position_embeddings", None), length_limit(model.config))
    return min((limit for limit in limits if limit), default=None)


class _Decoding:
    """The state of one batch: texts so far, which prompts are unfinished, the target's cache, the drafter's state."""

    def __init__(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        drafter: Drafter | None,
        frozen: FrozenTarget | None,
        draft_tokens: int,
        max_new_tokens: int,
        eos_ids: Collection[int],
        max_context: int | None,
    ):
        self.prompts, self.drafter, self.frozen, self.k = prompts, drafter, frozen, draft_tokens
        self.eos_ids = frozenset(eos_ids)
        self.device = next(model.parameters()).device
        self.max_context = max_context or context_limit(model)
        self.limits = [self._room(prompt, max_new_tokens) for prompt in prompts]
        self.decoded = [Decoded() for _ in prompts]
        self.starts: list[list[int]] = [[] for _ in prompts]  # of each round: how much text there was before it
        self.unfinished = [i for i, limit in enumerate(self.limits) if limit > 0]
        layers = text_config(model.config).num_hidden_layers
        self.target = cached_target(model, drafter.contract(drafter.config, layers).taps if drafter else None)
        self.draft_state = drafter.new_state(len(prompts)) if drafter else None
        if drafter and len(self.unfinished) < len(prompts):
            self.draft_state.select(torch.tensor(self.unfinished))

    def _room(self, prompt: Sequence[int], max_new_tokens: int) -> int:
        if not len(prompt) or (self.max_context and len(prompt) > self.max_context):
            raise UserError(
                f"a prompt of {len(prompt)} tokens cannot be decoded: the target takes 1 to {self.max_context}",
                fix="shorten or drop this prompt",
            )
        return min(max_new_tokens, self.max_context - len(prompt)) if self.max_context else max_new_tokens

    @torch.no_grad()
    def run(self) -> list[Decoded]:
        if self.unfinished:
            rows = self._prefill()
            while self.unfinished:
                rows = self._round(rows)
        for decoded, starts in zip(self.decoded, self.starts):
            decoded.judged = [min(self.k, len(decoded.tokens) - start) for start in starts]
        return self.decoded

    def _prefill(self) -> Committed | None:
        """The prompts, padded on the left, so that the last slot is everybody's last token."""
        sequences = self.unfinished
        lengths = torch.tensor([len(self.prompts[i]) for i in sequences], device=self.device)
        width = int(lengths.max())
        tokens = torch.zeros(len(sequences), width, dtype=torch.long)
        for row, i in enumerate(sequences):
            tokens[row, width - len(self.prompts[i]) :] = torch.as_tensor(self.prompts[i])
        tokens = tokens.to(self.device)
        positions = torch.arange(width, device=self.device) - (width - lengths)[:, None]
        valid = positions >= 0
        positions = positions.clamp(min=0)
        step = self.target.forward(tokens, positions, valid, only_last=True)
        bonus, margins = self._choose(step.logits)
        next_tokens = torch.cat([tokens[:, 1:], bonus], dim=1)
        alive = self._extend(bonus.tolist(), margins, [0] * len(sequences))
        return self._advance(alive, step, next_tokens, positions, valid)

    def _round(self, rows: Committed | None) -> Committed | None:
        sequences = self.unfinished
        bonus = torch.tensor([[self.decoded[i].tokens[-1]] for i in sequences], device=self.device)
        block = bonus
        if self.drafter:
            drafts = self.drafter.propose(self.draft_state, rows, self.frozen, self.k)  # [b, k]
            block = torch.cat([bonus, drafts.to(bonus)], dim=1)
        lengths = torch.tensor([len(self.prompts[i]) + len(self.decoded[i].tokens) for i in sequences])
        positions = (lengths[:, None] - 1 + torch.arange(self.k + 1)).to(self.device)
        if self.max_context:  # Slots past the end of the context are never judged; their position has to exist, though.
            positions = positions.clamp(max=self.max_context - 1)
        step = self.target.forward(block, positions, torch.ones_like(block, dtype=torch.bool))
        choices, margins = self._choose(step.logits)  # what the target writes after each slot
        accepted = (block[:, 1:] == choices[:, :-1]).int().cumprod(dim=1).sum(dim=1)
        foreseen = getattr(self.draft_state, "confidence", None)
        foreseen = None if foreseen is None else foreseen.tolist()
        for row, i in enumerate(sequences):
            self.starts[i].append(len(self.decoded[i].tokens))
            if foreseen:
                self.decoded[i].confidence.append(foreseen[row])
        alive = self._extend(choices.tolist(), margins, accepted.tolist())
        for row, i in enumerate(sequences):
            self.decoded[i].accepted.append(min(int(accepted[row]), len(self.decoded[i].tokens) - self.starts[i][-1]))
        valid = torch.arange(self.k + 1, device=self.device) <= accepted[:, None]
        return self._advance(alive, step, choices, positions, valid)

    def _choose(self, logits: Tensor) -> tuple[Tensor, list[list[float]] | None]:
        """The target's greedy choice at each slot [b, T], and how clear it was (plain decoding only)."""
        if self.drafter:
            return logits.argmax(dim=-1), None
        first, second = logits.float().topk(2, dim=-1).values.unbind(-1)
        return logits.argmax(dim=-1), (first - second).tolist()

    def _extend(self, choices: list[list[int]], margins: list[list[float]] | None, accepted: list[int]) -> list[int]:
        """Writes accepted + 1 choices to each unfinished text, up to its end. Returns the rows that go on."""
        alive = []
        for row, i in enumerate(self.unfinished):
            decoded = self.decoded[i]
            for slot in range(accepted[row] + 1):
                decoded.tokens.append(choices[row][slot])
                if margins:
                    decoded.margins.append(margins[row][slot])
                if choices[row][slot] in self.eos_ids:
                    decoded.finish_reason = "stop"
                    break
                if len(decoded.tokens) == self.limits[i]:
                    break
            else:
                alive.append(row)
        return alive

    def _advance(
        self, alive: list[int], step: TargetStep, next_tokens: Tensor, positions: Tensor, valid: Tensor
    ) -> Committed | None:
        """Drops what was rejected and who has finished; returns the rows that were committed, for the drafter."""
        sequences = torch.tensor(alive, dtype=torch.long, device=self.device)
        step = self.target.keep(step, valid, sequences)
        self.unfinished = [self.unfinished[row] for row in alive]
        if not (self.drafter and alive):
            return None
        if len(alive) < len(valid):
            self.draft_state.select(sequences)
        rows = (step.taps, step.final, next_tokens, positions, valid)
        return Committed(*(values[sequences] for values in rows))
