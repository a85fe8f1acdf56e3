"""DFlash: a block of drafts in one pass over the target's hidden states (arXiv 2602.06036).

Letters: T rows of a pack, N blocks (or sequences) of B slots, K drafts per block, A taps, H width, D draft vocabulary.

The context c_t = norm(fc(taps of position t)) is made once; no layer updates it. A block starts at an anchor a: slot 0
reads the bonus token x_a, the other slots the mask token, at positions a + j. Draft k predicts x_{a+1+k}; its teacher
is the target's distribution p_{a+k}.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config

from data_pipelines.errors import UserError, check_choice

from ..batch import Batch
from ..losses import CHUNK_ELEMENTS, Judged, upcast
from ..target import FrozenTarget
from .attention import rightmost
from .base import Committed, Contract, Drafter, check_taps, default_taps
from .block_cost import BlockCost
from .blocks import CachedBlocks, TrainedBlocks, block_seen, context_seen, draw_anchors
from .layers import BlockLayer, Rotary, init_linears
from .shape import FULL, SLIDING, ShapeConfig, check_layer_types, draft_layer_config, shape_keys, warn_of_engines

SLOTS = {"anchor_predicts": 0, "anchor_is_context": 1}  # → the slot of the first draft
WEIGHTINGS = ("exponential", "dpace")
log = logging.getLogger(__name__)


@dataclass
class DFlashConfig(ShapeConfig):
    """taps: the target layers that feed the drafter; empty: [2, L//2, L-3]. block_size: B. slots: `anchor_predicts`
    (all B slots draft) or `anchor_is_context` (the anchor's slot does not: B-1 drafts). mask_token: id of the token in
    slots that hold no real one; -1: one that texts do not use is chosen. anchors: blocks trained per pack, at most.

    weighting: `exponential` (draft k weighs exp(-k/gamma); gamma 4 for 7 or 8 slots, 7 for 16) or `dpace`, by how
    likely the drafts up to each are (dpace_alpha smooths).

    layer_types: of each layer, full_attention or sliding_attention (the last sliding_window positions before the
    anchor); empty: all full. sliding_window_non_causal: a block's slots see each other both ways in sliding layers too.
    """

    training = ShapeConfig.training | {"anchors", "weighting", "gamma", "dpace_alpha"}

    name: str = "dflash"
    loss: str = "ce"
    taps: list[int] = field(default_factory=list)
    num_layers: int = 5
    block_size: int = 16
    slots: str = "anchor_is_context"
    mask_token: int = -1
    anchors: int = 512
    weighting: str = "exponential"
    gamma: float = 7.0
    dpace_alpha: float = 0.5
    layer_types: list[str] = field(default_factory=list)
    sliding_window: int = 2048
    sliding_window_non_causal: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, options in (("slots", SLOTS), ("weighting", WEIGHTINGS)):
            check_choice(f"drafter.{key}", getattr(self, key), options)
        for key in ("num_layers", "anchors", "sliding_window"):
            if getattr(self, key) < 1:
                raise UserError(f"drafter.{key}={getattr(self, key)}; it must be at least 1")
        if self.max_drafts < 1:
            raise UserError(f"drafter.block_size={self.block_size} leaves no slot that drafts", fix="use at least 2")
        if self.gamma <= 0:
            raise UserError(f"drafter.gamma={self.gamma}; it must be positive")
        check_layer_types(self.layer_types, self.num_layers)

    @property
    def max_drafts(self) -> int:
        return self.block_size - SLOTS[self.slots]

    def completed(self, tokenizer, vocab_size: int) -> DFlashConfig:
        if self.mask_token >= vocab_size:
            raise UserError(
                f"drafter.mask_token={self.mask_token} is not in the target's vocabulary of {vocab_size}",
                fix="name another id, or -1 to have one chosen",
            )
        if self.mask_token >= 0:
            return self
        token, why = choose_mask_token(tokenizer, vocab_size)
        log.info("mask token of the blocks: id %d, %s (drafter.mask_token names another)", token, why)
        return replace(self, mask_token=token)


def choose_mask_token(tokenizer, vocab_size: int) -> tuple[int, str]:
    """An id of the target's embedding that texts do not use, and which that is."""
    if vocab_size > len(tokenizer):
        return len(tokenizer), "the first row of the embedding that is no token's"
    spare = [i for text, i in tokenizer.get_added_vocab().items() if "reserved" in text or "unused" in text]
    pad, unk, eos = tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id
    for token, why in (
        (tokenizer.mask_token_id, "the tokenizer's mask token"),
        (min(spare, default=None), "a reserved token"),
        (pad if pad != eos else None, "the padding token"),
        (unk if unk != eos else None, "the unknown token"),
        (eos, "the end-of-text token"),
    ):
        if token is not None:
            return token, why
    raise UserError("this tokenizer has no special token to fill a block with", fix="set drafter.mask_token=<id>")


@dataclass
class BlockState:
    """Of the context that decoding has committed, S slots: which are real, and their positions. [N, S] each.

    confidence [N, k]: of the latest drafts, see `DFlash.confidence`.
    """

    attentions: list[CachedBlocks]
    valid: torch.Tensor
    positions: torch.Tensor
    confidence: torch.Tensor | None = None

    def drop_rejected(self) -> None:
        """As many slots stay as the longest sequence has real ones."""
        if not self.valid.all():
            order = rightmost(self.valid)
            self.valid, self.positions = self.valid.gather(1, order), self.positions.gather(1, order)
            for attention in self.attentions:
                attention.take(order)

    def select(self, sequences: torch.Tensor) -> None:
        """Only these of the batch go on: int64 [N']."""
        self.valid, self.positions = (x[sequences.to(x.device)] for x in (self.valid, self.positions))
        for attention in self.attentions:
            attention.select(sequences)
        self.drop_rejected()


class DFlash(BlockCost, Drafter):
    Config = DFlashConfig
    first = 0

    def __init__(self, config: DFlashConfig, target_config, kept: torch.Tensor | None):
        super().__init__()
        if not 0 <= config.mask_token < target_config.vocab_size:
            raise UserError(f"drafter.mask_token={config.mask_token} is not in the target's vocabulary")
        self.config, self.depth = config, config.max_drafts
        exponential = config.weighting == "exponential"
        self.step_weights = [math.exp(-k / config.gamma) if exponential else 1.0 for k in range(self.depth)]
        self.taps = self.contract(config, target_config.num_hidden_layers).taps
        self.set_vocabulary(kept, target_config.vocab_size)
        self.layer_types = config.layer_types or [FULL] * config.num_layers
        sliding = SLIDING in self.layer_types
        self.layer_config = shape = draft_layer_config(
            config,
            config.num_layers,
            target_config,
            Qwen3Config,
            layer_types=self.layer_types,
            use_sliding_window=sliding,
            sliding_window=config.sliding_window if sliding else None,
        )
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc = nn.Linear(len(self.taps) * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.rotary = Rotary(shape)
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(size, eps)
        init_linears(self)

    @classmethod
    def contract(cls, config: DFlashConfig, num_layers: int) -> Contract:
        return Contract(check_taps(tuple(config.taps) or default_taps(num_layers), num_layers))

    def shard_units(self) -> list[nn.Module]:
        return list(self.layers)

    def final_norms(self) -> list[nn.Module]:
        return [self.norm]

    def head(self, frozen: FrozenTarget) -> torch.Tensor:
        """[D, H]"""
        return frozen.draft_head(self.kept)

    def sees_context(self, layer: int, positions: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """What a layer's queries see of the context, by position: bool [N, T]."""
        sliding = self.layer_types[layer] == SLIDING
        return context_seen(positions, anchors, self.config.sliding_window if sliding else None)

    def sees_block(self, layer: int, device: torch.device) -> torch.Tensor:
        """What they see of their own block: bool [B, B]."""
        causal = self.layer_types[layer] == SLIDING and not self.config.sliding_window_non_causal
        return block_seen(self.config.block_size, causal, device)

    def run_blocks(self, bonus, anchors, taps, positions, attentions, frozen: FrozenTarget) -> torch.Tensor:
        """The normed state of every draft, [N, K, H].

        bonus and anchors: int64 [N], the token in slot 0 and its position. taps [..., T, A, H] and positions int64
        [..., T]: the context's. attentions: one per layer.
        """
        # (No key scales the embeddings: consumers of this format embed the plain rows and read none.)
        offsets = torch.arange(self.config.block_size, device=bonus.device)
        tokens = torch.where(offsets == 0, bonus[:, None], self.config.mask_token)
        context, blocks = self.hidden_norm(self.fc(taps.flatten(-2))), frozen.embed(tokens)
        rope, context_rope = self.rotary(anchors[:, None] + offsets), self.rotary(positions)
        for layer, attention in zip(self.layers, attentions):
            blocks = self.recomputed(layer, blocks, rope, context, context_rope, attention)
        return self.norm(blocks[:, SLOTS[self.config.slots] :])

    # ---- training

    def rounds(self, batch: Batch) -> torch.Tensor:
        counts = super().rounds(batch)
        return counts & draw_anchors(counts[0], batch.document_ids, self.config.anchors, batch.generator())

    def divisors(self, denominators: torch.Tensor) -> torch.Tensor:
        """One number of drafts for all slots: a block is one thing, and far slots exist more rarely."""
        return denominators.sum().expand_as(denominators)

    def train_blocks(self, batch: Batch, frozen: FrozenTarget, rows: torch.Tensor) -> torch.Tensor:
        """rows int64 [N], ascending: the anchors' places in the pack. → [N, K, H]"""
        anchors, device = batch.positions[rows], rows.device

        def context(layer: int, chunk: slice) -> torch.Tensor:
            own_document = batch.document_ids[rows[chunk], None] == batch.document_ids
            return own_document & self.sees_context(layer, batch.positions, anchors[chunk])

        attentions = [
            TrainedBlocks(partial(context, i), self.sees_block(i, device), batch.part.gather)
            for i in range(len(self.layers))
        ]
        positions = batch.positions[batch.own]
        return self.run_blocks(batch.input_ids[rows], anchors, batch.taps, positions, attentions, frozen)

    def forward(self, batch, targets, frozen, weights):
        step, row = targets.entries
        anchors = targets.counts[0].nonzero().squeeze(1)  # a block whose first draft does not count has none that does
        block = torch.searchsorted(anchors, row)
        hidden = self.train_blocks(batch, frozen, anchors)
        # The token before each draft's label. (Past the end of a document nothing counts.)
        before = anchors[:, None] + torch.arange(self.depth, device=row.device)
        previous = batch.input_ids[before.clamp(max=len(batch.input_ids) - 1)]
        states, head = self.read_out(hidden, previous, frozen)
        states = states[block, step]
        factors = targets.trained[step, row].to(weights.dtype)
        if self.config.weighting == "dpace":
            labels = self.to_draft(batch.input_ids[row + 1 + step])
            probs = torch.zeros(len(anchors), self.depth, dtype=weights.dtype, device=row.device)
            probs[block, step] = label_probabilities(states, head, labels).to(weights.dtype)
            counts = targets.counts[:, anchors].T
            factors = factors * dpace(probs, counts, self.config.dpace_alpha)[block, step]
        loss, judged = self.draft_loss(batch, targets, frozen, states, head, weights[step] * factors)
        auxiliary = self.auxiliary_loss(hidden[block, step], previous[block, step], judged)
        return loss + (weights[step] * auxiliary).sum(), self.sums(targets, judged, judged.loss * factors + auxiliary)

    def read_out(
        self, hidden: torch.Tensor, previous: torch.Tensor, frozen: FrozenTarget
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States [N, K, H'] and a head [D, H'] whose product is the drafts' logits. previous: int64 [N, K], the token
        before each draft."""
        return hidden, self.head(frozen)

    def auxiliary_loss(self, hidden: torch.Tensor, previous: torch.Tensor, judged: Judged) -> torch.Tensor:
        """[n], of drafts with hidden [n, H]: what is learnt beside the drafts themselves. Here nothing."""
        return torch.zeros_like(judged.loss)

    # ---- decoding

    def new_state(self, batch_size: int) -> BlockState:
        none = torch.zeros(batch_size, 0, dtype=torch.long)
        return BlockState([CachedBlocks() for _ in self.layers], none.bool(), none)

    @torch.no_grad()
    def propose(self, state: BlockState, rows: Committed, frozen: FrozenTarget, k: int) -> torch.Tensor:
        """The whole block is always run, as in training; k of its drafts are wanted."""
        if k > self.depth:
            raise UserError(f"a block of this drafter holds {self.depth} drafts, not {k}", fix="draft fewer a round")
        state.valid = torch.cat([state.valid.to(rows.valid.device), rows.valid], 1)
        state.positions = torch.cat([state.positions.to(rows.valid.device), rows.positions], 1)
        index = torch.arange(rows.valid.shape[1], device=rows.valid.device)
        last = torch.where(rows.valid, index, 0).amax(1)  # the last valid row of each sequence
        sequences = torch.arange(len(last), device=last.device)
        bonus, anchors = rows.next_tokens[sequences, last], rows.positions[sequences, last] + 1
        for i, attention in enumerate(state.attentions):
            context = state.valid & self.sees_context(i, state.positions, anchors)
            attention.expect(context, self.sees_block(i, bonus.device))
        hidden = self.run_blocks(bonus, anchors, rows.taps, rows.positions, state.attentions, frozen)
        state.drop_rejected()
        drafts = self.choose(hidden[:, :k], bonus, frozen)
        state.confidence = self.confidence(hidden[:, :k], torch.cat([bonus[:, None], drafts[:, :-1]], 1))
        return drafts

    def choose(self, hidden: torch.Tensor, bonus: torch.Tensor, frozen: FrozenTarget) -> torch.Tensor:
        """The greedy drafts, int64 [N, k]."""
        return self.to_target((hidden @ self.head(frozen).T).argmax(-1))

    def confidence(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor | None:
        """hidden [..., H], previous int64 [...], the token before each draft → the logit of each draft's acceptance, given
        that the ones before it are accepted, [...]; None if the drafter has not learnt it."""
        return None

    # ---- export (speculators format, dflash)

    def export_config(self, frozen: FrozenTarget) -> dict[str, Any]:
        warn_of_engines(self.layer_config)
        # vLLM takes one flag for all layers: without sliding layers it must say what the full ones are, bidirectional.
        non_causal = self.config.sliding_window_non_causal or SLIDING not in self.layer_types
        if not non_causal and FULL in self.layer_types:
            log.warning(
                "vLLM would serve the full-attention layers of this drafter causal; they were trained both ways"
            )
        return {
            "speculators_model_type": "dflash",
            "architectures": ["DFlashDraftModel"],
            "draft_vocab_size": self.draft_vocab_size,
            "aux_hidden_state_layer_ids": list(self.taps),
            "block_size": self.config.block_size,
            "mask_token_id": self.config.mask_token,
            "sample_from_anchor": self.config.slots == "anchor_predicts",
            "sliding_window_non_causal": non_causal,
            "target_hidden_size": None,
            "transformer_layer_config": {**self.layer_config.to_diff_dict(), "model_type": "qwen3"},
        }

    @classmethod
    def config_from_export(cls, exported: dict[str, Any]) -> DFlashConfig:
        """How the drafter was trained does not come with an export."""
        layer = exported["transformer_layer_config"]
        window = {"sliding_window": layer["sliding_window"]} if layer.get("sliding_window") else {}
        return cls.Config(
            taps=exported["aux_hidden_state_layer_ids"],
            num_layers=layer["num_hidden_layers"],
            block_size=exported["block_size"],
            slots="anchor_predicts" if exported["sample_from_anchor"] else "anchor_is_context",
            mask_token=-1 if exported["mask_token_id"] is None else exported["mask_token_id"],
            draft_vocab_size=exported["draft_vocab_size"],
            layer_types=layer["layer_types"],
            sliding_window_non_causal=exported["sliding_window_non_causal"],
            **window,
            **shape_keys(layer),
        )

    def export_tensors(self, frozen: FrozenTarget) -> dict[str, torch.Tensor]:
        """The embedding is the target's; so is the head, but its rows of a draft vocabulary are written."""
        head = {} if self.kept is None else {"lm_head.weight": self.head(frozen)}
        return {**self.state_dict(), **head}


@torch.no_grad()
def label_probabilities(states: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """q(label) [n], of states [n, H'], in chunks; 0 for a label of -1 (outside the draft vocabulary)."""
    probs = []
    for rows, wanted in zip(*(x.split(max(1, CHUNK_ELEMENTS // len(head))) for x in (states, labels))):
        q = upcast(rows @ head.T).log_softmax(-1).gather(1, wanted.clamp(min=0)[:, None]).squeeze(1).exp()
        probs.append(torch.where(wanted >= 0, q, 0.0))
    return torch.cat(probs)


def dpace(probs: torch.Tensor, counts: torch.Tensor, alpha: float) -> torch.Tensor:
    """D-PACE weights [N, K]: how much of a block's expected length hangs on each draft.

    probs: q(label) [N, K]. counts: bool [N, K]; a draft that does not count neither passes nor weighs. With
    s = (1-alpha)·q + alpha, draft j weighs the sum of Π_{l≤i} s_l over all drafts i ≥ j.
    """
    survival = torch.where(counts, (1 - alpha) * probs + alpha, 1.0).cumprod(1) * counts
    return survival.flip(1).cumsum(1).flip(1) * counts
