"""Decoder layers that drafters share. They know shapes and weights; what may be attended to is handed to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Rotary(nn.Module):
    """cos and sin of positions, by transformers' own rotary embedding (it handles theta and scaling). Always fp32."""

    def __init__(self, config: LlamaConfig | None = None, *, embedding: nn.Module | None = None, **arguments):
        """embedding: another family's, called with `arguments` besides positions; by default the Llama one of `config`."""
        super().__init__()
        self.embedding = embedding or LlamaRotaryEmbedding(config=config)
        self._arguments = arguments

    def _apply(self, fn, recurse=True):
        """Frequencies follow the module from device to device, and never into another dtype: in bfloat16 they would be
        0.6 rad off at distance 512."""
        kept = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in list(self.named_buffers()):
            owner = self.get_submodule(name.rpartition(".")[0])
            owner.register_buffer(name.rpartition(".")[2], kept[name].to(buffer.device), persistent=False)
        return self

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [..., N] → cos, sin [..., N, d]."""
        nothing = torch.empty(0, device=positions.device)
        cos, sin = self.embedding(nothing, positions.reshape(1, -1), **self._arguments)
        return cos[0].view(*positions.shape, cos.shape[-1]), sin[0].view(*positions.shape, sin.shape[-1])


class DraftAttention(nn.Module):
    """Grouped-query attention over inputs of any width, in the config's family: Qwen3 norms queries and keys."""

    def __init__(self, config: PretrainedConfig, input_size: int):
        super().__init__()
        self.head_dim = config.head_dim
        q, kv = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(input_size, q, bias=False)
        self.k_proj = nn.Linear(input_size, kv, bias=False)
        self.v_proj = nn.Linear(input_size, kv, bias=False)
        self.o_proj = nn.Linear(q, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.head_dim, config.rms_norm_eps) if config.model_type == "qwen3" else nn.Identity()
            for _ in "qk"
        )

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def keys_values(self, x: torch.Tensor, rope) -> tuple[torch.Tensor, torch.Tensor]:
        """x [..., N, input_size] → k, v [..., kv_heads, N, d]."""
        k = self.k_norm(self._heads(self.k_proj(x))).transpose(-2, -3)
        return _rotate(k, *rope), self._heads(self.v_proj(x)).transpose(-2, -3)

    def forward(self, x: torch.Tensor, rope, attention: Attention, rows: torch.Tensor | None = None) -> torch.Tensor:
        k, v = self.keys_values(x, rope)
        if rows is not None:
            x, rope = x[rows], tuple(part[rows] for part in rope)
        q = _rotate(self.q_norm(self._heads(self.q_proj(x))).transpose(-2, -3), *rope)
        return self.o_proj(attention(q, k, v).transpose(-2, -3).flatten(-2))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE in the precision of cos and sin (fp32 at least), whatever x's."""
    wide = torch.promote_types(x.dtype, cos.dtype)
    cos, sin, y = cos.unsqueeze(-3), sin.unsqueeze(-3), x.to(wide)
    return (y * cos + rotate_half(y) * sin).to(x.dtype)


class DraftLayer(nn.Module):
    """An ordinary pre-norm decoder layer of width H."""

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config, config.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Qwen3MLP(config)

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


class BlockLayer(DraftLayer):
    """DFlash's layer: the blocks query a context that no layer updates, and themselves. The context's keys and values
    come from the same k_proj and v_proj, without the layer's input norm."""

    def forward(self, blocks, rope, context, context_rope, attention):
        """blocks [N, B, H], context [..., T, H] → [N, B, H]. attention: called with keys and values of the context first."""
        over_context = partial(attention, *self.self_attn.keys_values(context, context_rope))
        return self._finish(blocks, self.self_attn(self.input_layernorm(blocks), rope, over_context))


def init_linears(module: nn.Module) -> None:
    """N(0, 0.02), as the published drafters begin."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02)


@torch.no_grad()
def scale_norm(norm: nn.Module, factor: float) -> None:
    """Make a norm's outputs `factor` times as large, be its gain w or, as in some families, 1 + w. (One without a gain
    stays as it is.)"""
    gain, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if gain is None or factor == 1.0:
        return
    weights = [gain.clone(), *([bias.clone()] if bias is not None else [])]
    for part in (gain, bias) if bias is not None else (gain,):
        part.zero_()
    probe = torch.linspace(-1, 2, gain.shape[-1], dtype=gain.dtype, device=gain.device)
    offset = 1.0 if norm(probe).any() else 0.0
    gain.copy_((weights[0] + offset) * factor - offset)
    if bias is not None:
        bias.copy_(weights[1] * factor)
