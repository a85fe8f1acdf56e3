"""Multi-token prediction heads on a frozen target: one shared module (FastMTP, arXiv 2509.18362) or a chain of modules
(DeepSeek-V3, arXiv 2412.19437, §2.2).

Letters: T rows of a pack, B sequences, W rows of one decoding call, H width, K draft steps.

A module reads proj([norm(a); norm(b)]), where a and b are the embedding of the next token and a hidden state, through one
decoder layer of the target's own family and a final norm; the head is the target's. Step 0 reads the target's hidden state,
a later step the final-normed output of the step before, at the same row. Which row reads and predicts what: `rollout`.

What a module's attention sees:
* shared, `rollout` (default): the step-0 keys of rows ≤ t, and the later steps' keys of row t alone. A chain decode has one
  cache, which holds exactly that.
* shared, `own_step` (as FastMTP was published): the keys of its own step, of rows ≤ t. Engines decode with one cache all the
  same, so this trains something else than what is decoded; `propose` does what engines do.
* chained: a module cannot read keys that another one made, so it has a cache of its own, of *its* inputs at rows ≤ t. Module
  k at row j reads x_{j+1+k}: in decoding, rows up to t-k read tokens of the text and are kept; the k rows behind them read
  drafts and are made again in the next round. With the text in place of the drafts this is own-step attention: the two
  options are one here, and decoding sees what training saw.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from data_pipelines.engines import Target
from data_pipelines.engines.readout import relative_error
from data_pipelines.engines.targets import first_line
from data_pipelines.errors import UserError, check_choice

from ..batch import Batch
from ..target import FrozenTarget
from .attention import CachedAttention, RolloutAttention
from .base import Contract, DrafterConfig
from .cost import TRAINED, Flops, attention_shapes, matrix_elements, routed_share
from .family import OTHERS, Family
from .native_mtp import read_native_heads
from .rollout import RolloutDrafter, RolloutState
from .rollout_cost import merged_flops, recomputed

_CHOICES = {
    "form": ("shared", "chained"),
    "concat": ("embedding_first", "hidden_first"),
    "hidden": ("post_norm", "pre_norm"),
    "attention": ("rollout", "own_step"),
    "warm_start": ("auto", "never"),
}
READ = ("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # families whose MTP layer speculators 0.9 has
log = logging.getLogger(__name__)


@dataclass
class MTPConfig(DrafterConfig):
    """form: shared (one module, used at every step) or chained (a module for each step). steps: K. step_weight: β; a draft of
    step k weighs β**k, normalised to a sum of 1. concat: the order of the projection's input. hidden: which state of the
    target step 0 reads, after or before its final norm. attention: rollout or own_step, see the top of this file.
    warm_start: auto begins from the MTP head that the target's checkpoint brings along, if it has one.
    """

    training = DrafterConfig.training | {"steps", "step_weight", "attention", "warm_start"}

    name: str = "mtp"
    loss: str = "ce"
    form: str = "shared"
    steps: int = 3
    step_weight: float = 0.6
    concat: str = "embedding_first"
    hidden: str = "post_norm"
    attention: str = "rollout"
    warm_start: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, options in _CHOICES.items():
            check_choice(f"drafter.{key}", getattr(self, key), options)
        if self.steps < 1:
            raise UserError(f"drafter.steps={self.steps}; it must be at least 1")

    @property
    def max_drafts(self) -> int | None:
        return self.steps if self.form == "chained" else None


def new_module(family: Family) -> nn.Module:
    """One MTP module: the family's decoder layer, with what is in front of it and behind it added."""

    class MTPModule(family.layer_class):
        def __init__(self):
            super().__init__(family.config, family.index)
            size = family.config.hidden_size
            self.token_layernorm, self.hidden_layernorm, self.final_layernorm = (family.norm() for _ in range(3))
            self.input_proj = nn.Linear(2 * size, size, bias=False)

        def forward(self, embeds, hidden, positions, *, rotary, attention, hidden_first):
            """embeds and hidden [B, N, H], positions [B, N] → [B, N, H], normed."""
            parts = [self.token_layernorm(embeds), self.hidden_layernorm(hidden)]
            mixed = self.input_proj(torch.cat(parts[::-1] if hidden_first else parts, -1))
            output = super().forward(
                mixed,
                position_embeddings=rotary(positions),
                attention_mask=family.mask,
                draft_attention=attention,
                **family.layer_arguments(),
            )
            return self.final_layernorm(output[0] if isinstance(output, tuple) else output)

    module = MTPModule()
    family.initialise(module)
    return module


@dataclass
class ChainedState(RolloutState):
    """One cache per module, and the latest K-1 committed rows [B, K-1, …], which every call makes again: what step 0 read,
    next tokens, positions, valid."""

    recent: tuple[torch.Tensor, ...] | None = None

    def select(self, sequences: torch.Tensor) -> None:
        super().select(sequences)
        if self.recent is not None:
            self.recent = tuple(x[sequences] for x in self.recent)


class MTP(RolloutDrafter):
    Config = MTPConfig
    attending = 1
    feeds_normed = True

    def __init__(self, config: MTPConfig, target_config, kept: torch.Tensor | None):
        super().__init__()
        self.config, self.depth = config, config.steps
        raw = [config.step_weight**k for k in range(config.steps)]
        self.step_weights = [weight / sum(raw) for weight in raw]
        self.set_vocabulary(kept, target_config.vocab_size)
        self.target_config = copy.deepcopy(target_config)
        modules = config.steps if config.form == "chained" else 1
        try:
            family = Family(target_config)
            self.rotary = family.rotary()
            self.mtp_layers = nn.ModuleList(new_module(family) for _ in range(modules))
            self._try_layer(family)
        except UserError:
            raise
        except Exception as error:  # families' own code, of any family
            raise UserError(
                f"the decoder layer of a {target_config.model_type} target cannot be run as an MTP head",
                where=f"{type(error).__name__}: {first_line(error)}",
                fix=OTHERS,
            ) from error

    @torch.no_grad()
    def _try_layer(self, family: Family) -> None:
        """A few rows through the first module, with this project's attention and with the family's own. Some layers need more
        than they are given here (embeddings for each layer, keys of other layers); some look at tokens in a way of their
        own. What is drafted would not be what the layer is."""
        weight = next(self.mtp_layers.parameters())
        if weight.is_meta:
            return
        rows = torch.arange(5, device=weight.device)
        states = torch.linspace(-1, 1, 5 * self.target_config.hidden_size).cos().to(weight).view(1, 5, -1)
        self.eval()
        attention = RolloutAttention(rows * 0, rows)
        ours = self.run_module(0, states, states, rows[None], attention)
        with family.own_attention(rows):
            theirs = self.run_module(0, states, states, rows[None], attention)
        self.train()
        error = relative_error(ours, theirs)
        if not error < 1e-3:
            raise ValueError(
                f"causal attention gives other states than its own does, off by {error:.3g} of the largest"
            )

    @classmethod
    def contract(cls, config: MTPConfig, num_layers: int) -> Contract:
        return Contract(())

    def final_norms(self):
        return [module.final_layernorm for module in self.mtp_layers]

    def warm_start(self, target: Target) -> None:
        """Begin from the target's own head. Steps that it has no module for begin from its last one, as engines use it."""
        heads = read_native_heads(target, self.mtp_layers[0]) if self.config.warm_start == "auto" else []
        for k, module in enumerate(self.mtp_layers if heads else ()):
            module.load_state_dict(self._ordered(heads[min(k, len(heads) - 1)]))

    def _ordered(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """One module's tensors, with the projection's input embedding first instead of in this drafter's order, or back."""
        if self.config.concat == "embedding_first":
            return tensors
        return {**tensors, "input_proj.weight": torch.cat(tensors["input_proj.weight"].chunk(2, 1)[::-1], 1)}

    def module_tensors(self) -> list[dict[str, torch.Tensor]]:
        """Of each module, with the projection's input embedding first, whatever this drafter's order."""
        return [self._ordered(module.state_dict()) for module in self.mtp_layers]

    def start(self, taps, final, frozen):
        return frozen.normed(final) if self.config.hidden == "post_norm" else final

    def run_module(self, k: int, embeds, hidden, positions, attention) -> torch.Tensor:
        """Module k over [..., N, H]; inputs without a batch dimension are given one for the family's layer."""
        flat = positions.dim() == 1
        if flat:
            embeds, hidden, positions = embeds[None], hidden[None], positions[None]
        hidden_first = self.config.concat == "hidden_first"
        output = self.mtp_layers[k](
            embeds, hidden, positions, rotary=self.rotary, attention=attention, hidden_first=hidden_first
        )
        return output[0] if flat else output

    def run_layers(self, embeds, hidden, positions, attentions, rows=None):
        output = self.run_module(0, embeds, hidden, positions, attentions[0])
        return output if rows is None else output[rows]

    def normed(self, hidden):
        return hidden  # a module ends with its norm

    # ---- cost

    @property
    def every_row(self) -> bool:
        """Whether later steps run every row, not only those that count."""
        return self.config.form == "chained" or self.config.attention == "own_step"

    def body_flops(self, work, recompute):
        module = matrix_elements(self.mtp_layers[0], routed_share(self.target_config))
        rows = self.depth * work.tokens if self.every_row else work.tokens + sum(work.rows[1:])
        pairs = self.depth * work.all_pairs if self.every_row else work.all_pairs + sum(work.pairs[1:])
        total = Flops(TRAINED * module * rows) + merged_flops(attention_shapes(self.target_config)[-1], pairs)
        return recomputed(total) if recompute else total

    def activations(self, work, kept, state, recompute):
        if not self.every_row:
            return super().activations(work, kept, state, recompute)
        first = kept[0] * work.tokens
        return (self.depth * work.tokens * state, first) if recompute else (self.depth * first, 0.0)

    # ---- training

    def roll_out(self, batch, frozen, rows):
        if self.config.form == "shared" and self.config.attention == "rollout":
            return super().roll_out(batch, frozen, rows)
        hidden, outputs = self.start(batch.taps, batch.final[: len(batch.taps)], frozen), []
        for k, wanted in enumerate(rows):
            hidden = self.recomputed(self._own_step, batch, frozen, k, hidden)
            outputs.append(hidden[wanted - batch.own.start])
        return outputs

    def _own_step(self, batch: Batch, frozen: FrozenTarget, k: int, hidden: torch.Tensor) -> torch.Tensor:
        """All rows, every step. (A row whose token would lie past its document's end is seen by none that has one.)"""
        run = batch.own_rows
        attention = RolloutAttention(run - batch.positions[run], run, gather=batch.part.gather)
        embeds, module = frozen.embed(batch.input_ids.roll(-1 - k)[run]), k if self.config.form == "chained" else 0
        return self.run_module(module, embeds, hidden, batch.positions[run] + k, attention)

    # ---- decoding

    def new_state(self, batch_size: int) -> ChainedState:
        return ChainedState([CachedAttention(batch_size) for _ in self.mtp_layers])

    def propose(self, state, rows, frozen, k):
        if self.config.form == "shared":
            return super().propose(state, rows, frozen, k)
        if k > self.depth:
            raise UserError(
                f"a chained MTP drafter of {self.depth} modules cannot draft {k} tokens a round",
                fix=f"set evaluate.draft_tokens to at most {self.depth}, or train with a larger drafter.steps",
            )
        return self._propose_chained(state, rows, frozen)[:, :k]

    @torch.no_grad()
    def _propose_chained(self, state, rows, frozen) -> torch.Tensor:
        """[B, K]. Every module runs the same W rows: the K-1 latest of before, which then read drafts, and the new ones."""
        again = self.depth - 1
        new = (self.start(rows.taps, rows.final, frozen), rows.next_tokens, rows.positions, rows.valid)
        recent = state.recent or tuple(x.new_zeros(x.shape[0], again, *x.shape[2:]) for x in new)
        joined = [torch.cat(pair, 1) for pair in zip(recent, new)]
        order = joined[-1].int().argsort(dim=1, stable=True)  # valid rows to the right end, in their order
        batch = torch.arange(len(order), device=order.device)[:, None]
        hidden, stream, positions, valid = (x[batch, order] for x in joined)
        width = valid.shape[1]
        state.recent = tuple(x[:, width - again :] for x in (hidden, stream, positions, valid))
        for step, cache in enumerate(state.caches):
            cache.expect(valid, commit=False)
            embeds = frozen.embed(stream[:, step : step + width])
            hidden = self.run_module(step, embeds, hidden, positions + step, cache)
            stream = torch.cat([stream, self.choose(hidden[:, -1:], frozen)], 1)
            cache.commit(width - again)
            cache.drop_drafts()
        return stream[:, width:]

    # ---- export (speculators format, mtp)

    def export_config(self, frozen) -> dict[str, Any]:
        """Engines read the shared form over the whole vocabulary, on the post-norm state; `hidden_kind` and a
        `draft_vocab_size` are for this project's own loader."""
        family = self.target_config.model_type
        if family not in READ:
            log.warning(
                "no engine reads an MTP head of a %s target in this format (speculators 0.9 has those of %s); here it can be "
                "judged, and stitched into a target that has such a head",
                *(family, ", ".join(READ)),
            )
        layer = {**self.target_config.to_diff_dict(), "model_type": family}
        vocabulary = {} if self.kept is None else {"draft_vocab_size": self.draft_vocab_size}
        return {
            "speculators_model_type": "mtp",
            "architectures": ["MTPDraftModel"],
            "num_nextn_predict_layers": len(self.mtp_layers),
            "hidden_kind": self.config.hidden,
            "transformer_layer_config": layer,
            **vocabulary,
        }

    @classmethod
    def config_from_export(cls, exported: dict[str, Any]) -> MTPConfig:
        modules = exported["num_nextn_predict_layers"]
        return MTPConfig(
            form="chained" if modules > 1 else "shared",
            steps=modules if modules > 1 else exported["speculative_tokens"],
            hidden=exported["hidden_kind"],
            draft_vocab_size=exported.get("draft_vocab_size", 0),
        )

    def export_tensors(self, frozen) -> dict[str, torch.Tensor]:
        tensors = dict(self.state_dict())
        for k, module in enumerate(self.module_tensors()):
            tensors.update({f"mtp_layers.{k}.{name}": tensor for name, tensor in module.items()})
        return tensors
