"""Targets of several families, and drafters whose answers are known beforehand."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "qwen3": lambda: Qwen3Config(**SHAPE),
    # Sliding windows shorter than the texts: a window counted over rejected slots would show.
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=7),
    "gemma2": lambda: Gemma2Config(**SHAPE, sliding_window=7, query_pre_attn_scalar=8, final_logit_softcapping=30.0),
    # Learned positions: a block fed past the last one is an index error.
    "gpt2": lambda: GPT2Config(
        vocab_size=96, n_embd=32, n_layer=4, n_head=4, n_positions=64, initializer_range=0.2, eos_token_id=None
    ),
}


def build(family: str):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).eval().requires_grad_(False)


@dataclass
class KnownDrafter:
    """Proposes the right continuation of each text, and spoils draft j of the round whose bonus is text token i where
    `wrong(i, j)` says so. `rows` collects, per sequence, everything that the loop committed.

    texts: per sequence, what the target really writes.
    """

    prompts: list[list[int]]
    texts: list[list[int]]
    wrong: object = lambda i, j: False
    taps: tuple[int, ...] = (1, 2, 4)
    rows: dict[int, list] = field(default_factory=dict)

    config: object = None

    def contract(self, config, num_layers: int):
        return SimpleNamespace(taps=self.taps)

    def new_state(self, batch_size: int):
        self.rows = {b: [] for b in range(batch_size)}
        return Going(list(range(batch_size)))

    def propose(self, state, rows, frozen, k):
        assert len(rows.valid) == len(state.sequences)  # who has finished is not drafted for
        drafts = torch.zeros(len(state.sequences), k, dtype=torch.long)
        for row, b in enumerate(state.sequences):
            for t in range(rows.valid.shape[1]):
                if rows.valid[row, t]:
                    position, token = int(rows.positions[row, t]), int(rows.next_tokens[row, t])
                    self.rows[b].append((position, token, rows.taps[row, t], rows.final[row, t]))
            bonus = self.rows[b][-1][0] + 1 - len(self.prompts[b])  # its place in the text
            for j in range(1, k + 1):
                right = self.texts[b][bonus + j] if bonus + j < len(self.texts[b]) else 0
                drafts[row, j - 1] = (right + 1) % 96 if self.wrong(bonus, j) else right
        return drafts


@dataclass
class Going:
    """Which prompts are still drafted for."""

    sequences: list[int]

    def select(self, rows: torch.Tensor) -> None:
        self.sequences = [self.sequences[row] for row in rows.tolist()]
