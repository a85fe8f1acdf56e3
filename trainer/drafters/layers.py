"""Decoder layers that drafters share. They know shapes and weights; what may be attended to is handed to them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, rotate_half

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Rotary(nn.Module):
    """cos and sin of positions, by transformers' own rotary embedding (it handles theta and scaling). Always fp32."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.embedding = LlamaRotaryEmbedding(config=config)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [..., N] → cos, sin [..., N, d]."""
        cos, sin = self.embedding(torch.empty(0, device=positions.device), positions.reshape(1, -1))
        return cos[0].view(*positions.shape, cos.shape[-1]), sin[0].view(*positions.shape, sin.shape[-1])


class DraftAttention(nn.Module):
    def __init__(self, config: LlamaConfig, input_size: int):
        super().__init__()
        self.head_dim = config.head_dim
        q, kv = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(input_size, q, bias=False)
        self.k_proj = nn.Linear(input_size, kv, bias=False)
        self.v_proj = nn.Linear(input_size, kv, bias=False)
        self.o_proj = nn.Linear(q, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, rope, attention: Attention, rows: torch.Tensor | None) -> torch.Tensor:
        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (-1, self.head_dim)).transpose(-2, -3)

        cos, sin = rope
        k, v = heads(self.k_proj(x)), heads(self.v_proj(x))
        k = _rotate(k, cos, sin)
        if rows is not None:
            x, cos, sin = x[rows], cos[rows], sin[rows]
        q = _rotate(heads(self.q_proj(x)), cos, sin)
        return self.o_proj(attention(q, k, v).transpose(-2, -3).flatten(-2))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE in the precision of cos and sin (fp32 at least), whatever x's."""
    wide = torch.promote_types(x.dtype, cos.dtype)
    cos, sin, y = cos.unsqueeze(-3), sin.unsqueeze(-3), x.to(wide)
    return (y * cos + rotate_half(y) * sin).to(x.dtype)


class DraftLayer(nn.Module):
    """An ordinary pre-norm decoder layer of width H."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config, config.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, hidden: torch.Tensor, rope, attention: Attention, rows: torch.Tensor | None = None):
        """hidden [..., N, H] → [..., N, H], or only the given rows of it (keys are made of all)."""
        attended = self.self_attn(self.input_layernorm(hidden), rope, attention, rows)
        return self._finish(hidden if rows is None else hidden[rows], attended)

    def _finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        residual = residual + attended
        return residual + self.mlp(self.post_attention_layernorm(residual))


class FusionLayer(DraftLayer):
    """EAGLE-3's first layer: attention reads [norm(embedding); norm(hidden)] (2H), the residual comes from the hidden
    state alone. EAGLE-3 paper (arXiv 2503.01840), section 3.1."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool):
        super().__init__(config)
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config, 2 * config.hidden_size)

    def forward(self, embeds, hidden, rope, attention: Attention, rows: torch.Tensor | None = None):
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        attended = self.self_attn(torch.cat([self.input_layernorm(embeds), normed], -1), rope, attention, rows)
        return self._finish(residual if rows is None else residual[rows], attended)
