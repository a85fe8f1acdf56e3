"""DSpark: DFlash that drafts a block's tokens one after the other, and says how far it trusts them.

The block runs once, as in DFlash. A *sequential head* then adds to each draft's logits a low-rank bias that depends on
the token before it: the document's in training, the draft itself in decoding. A *confidence head* tells how likely each
draft is to be accepted.

Letters: N blocks, K drafts per block, H width, r rank, D draft vocabulary.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from data_pipelines.errors import UserError, check_choice

from ..losses import Judged, upcast
from ..target import FrozenTarget
from .cost import elements
from .dflash import SLIDING, DFlash, DFlashConfig

HEADS = ("vanilla", "gated", "rnn")
log = logging.getLogger(__name__)


@dataclass
class DSparkConfig(DFlashConfig):
    """markov_rank: r of the sequential head; 0: none. markov_head: `vanilla`, `gated` or `rnn` (vLLM serves vanilla
    only). confidence_weight: of the confidence head's loss; 0: no such head. confidence_with_markov: it reads what the
    sequential head embeds, too.
    """

    name: str = "dspark"
    loss: str = "0.1*ce + 0.9*l1"
    block_size: int = 7
    slots: str = "anchor_predicts"
    gamma: float = 4.0
    sliding_window_non_causal: bool = False  # as vLLM serves it, whatever the export says
    markov_rank: int = 256
    markov_head: str = "vanilla"
    confidence_weight: float = 1.0
    confidence_with_markov: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slots != "anchor_predicts":
            raise UserError(f"drafter.slots={self.slots}", fix="DSpark drafts from the anchor on: anchor_predicts")
        check_choice("drafter.markov_head", self.markov_head, HEADS)
        if self.markov_rank < 0:
            raise UserError(f"drafter.markov_rank={self.markov_rank}; it must be at least 0")


class MarkovHead(nn.Module):
    """A bias on the logits from the token before: W2 · (features of W1[previous])."""

    def __init__(self, kind: str, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int):
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        nn.init.normal_(self.markov_w1.weight, std=0.01)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def step(
        self, hidden: torch.Tensor, previous: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One draft of N blocks: hidden [N, H], previous int64 [N], state [N, r] (None at the first) → what W2 is
        applied to, [N, r], and the state for the next draft."""
        embedded = self.markov_w1(previous)
        if self.kind == "vanilla":
            return embedded, None
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], -1))) * embedded, None
        state = torch.zeros_like(embedded) if state is None else state
        gate, candidate, out = self.joint_proj(torch.cat([state, embedded, hidden], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(candidate)


class ConfidenceHead(nn.Module):
    def __init__(self, input_size: int):
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.proj(features).squeeze(-1)


class DSpark(DFlash):
    Config = DSparkConfig

    def __init__(self, config: DSparkConfig, target_config, kept: torch.Tensor | None):
        super().__init__(config, target_config, kept)
        size, rank = self.layer_config.hidden_size, config.markov_rank
        self.markov_head = self.confidence_head = None
        if rank:
            self.markov_head = MarkovHead(config.markov_head, self.vocab_size, self.draft_vocab_size, rank, size)
        if config.confidence_weight:
            self.confidence_head = ConfidenceHead(size + rank * config.confidence_with_markov)

    def confidence(self, hidden, previous):
        if self.confidence_head is None:
            return None
        if self.markov_head is not None and self.config.confidence_with_markov:
            hidden = torch.cat([hidden, self.markov_head.markov_w1(previous)], -1)
        return self.confidence_head(hidden)

    # ---- cost

    def sequential_elements(self):
        parts = [p for p in (self.markov_head, self.confidence_head) if p is not None]
        return elements(
            m for part in parts for n, m in part.named_children() if n in ("gate_proj", "joint_proj", "proj")
        )

    def head_width(self, width):
        return width + (self.markov_head.rank if self.markov_head is not None else 0)  # [W | W2] is one head

    def learns_head(self):
        return self.markov_head is not None  # a part of it

    # ---- training

    def read_out(self, hidden, previous, frozen):
        """W·h + W2·e is one product, of [h; e] and [W | W2]: the loss needs to know of no second head."""
        if self.markov_head is None:
            return super().read_out(hidden, previous, frozen)
        features, state = [], None
        for k in range(hidden.shape[1]):
            feature, state = self.markov_head.step(hidden[:, k], previous[:, k], state)
            features.append(feature)
        head = torch.cat([self.head(frozen), self.markov_head.markov_w2.weight], 1)
        return torch.cat([hidden, torch.stack(features, 1)], -1), head

    def auxiliary_loss(self, hidden: torch.Tensor, previous: torch.Tensor, judged: Judged) -> torch.Tensor:
        """Cross entropy of the confidence against the probability that the draft is accepted, 1 - ½‖q - p‖₁. All drafts
        that count are taken: one that the draft vocabulary lacks is a rejection that the head has to foresee."""
        if self.confidence_head is None:
            return super().auxiliary_loss(hidden, previous, judged)
        confidence = upcast(self.confidence(hidden, previous))
        accepted = judged.expected_acceptance.clamp(0, 1)
        return self.config.confidence_weight * F.binary_cross_entropy_with_logits(
            confidence, accepted.to(confidence.dtype), reduction="none"
        )

    # ---- decoding

    def choose(self, hidden: torch.Tensor, bonus: torch.Tensor, frozen: FrozenTarget) -> torch.Tensor:
        if self.markov_head is None:
            return super().choose(hidden, bonus, frozen)
        head, token, state, drafts = self.head(frozen), bonus, None, []
        for k in range(hidden.shape[1]):
            feature, state = self.markov_head.step(hidden[:, k], token, state)
            logits = hidden[:, k] @ head.T + self.markov_head.markov_w2(feature)
            token = self.to_target(logits.argmax(-1))
            drafts.append(token)
        return torch.stack(drafts, 1)

    # ---- export (speculators format, dspark)

    def export_config(self, frozen: FrozenTarget) -> dict[str, Any]:
        if self.markov_head is not None and self.config.markov_head != "vanilla":
            log.warning(
                "vLLM serves the vanilla sequential head only; this drafter has a %s one", self.config.markov_head
            )
        if SLIDING in self.layer_types and self.config.sliding_window_non_causal:
            log.warning("vLLM serves DSpark's sliding layers causal; this drafter's were trained both ways")
        return {
            **super().export_config(frozen),
            "speculators_model_type": "dspark",
            "architectures": ["DSparkDraftModel"],
            "markov_rank": self.config.markov_rank,
            "markov_head_type": self.config.markov_head,
            "enable_confidence_head": self.confidence_head is not None,
            "confidence_head_with_markov": (
                self.confidence_head is not None and self.markov_head is not None and self.config.confidence_with_markov
            ),
        }

    @classmethod
    def config_from_export(cls, exported: dict[str, Any]) -> DSparkConfig:
        config = super().config_from_export(exported)
        config.markov_rank = exported["markov_rank"]
        config.markov_head = exported["markov_head_type"]
        config.confidence_weight = float(exported["enable_confidence_head"])
        config.confidence_with_markov = exported["confidence_head_with_markov"] or not exported["markov_rank"]
        return config
