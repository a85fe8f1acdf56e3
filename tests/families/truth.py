"""What a whole model says of itself, by its own forward alone: no code of this project.

Letters: n tokens, V vocabulary, L layers, H width.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from .shrink import ORDINARY_TOKENS


def load_whole(folder: Path) -> PreTrainedModel:
    """The class that saved the checkpoint, in float32, with the plainest attention."""
    name = AutoConfig.from_pretrained(folder).architectures[0]
    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def ordinary_tokens(n: int, seed: int) -> torch.Tensor:
    """int64 [1, n], none of them special."""
    return torch.randint(5, ORDINARY_TOKENS, (1, n), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def own_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """ids [1, n] → float32 [n, V]."""
    return model(input_ids=ids, use_cache=False).logits[0].float()


@torch.no_grad()
def own_hidden_states(model: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """ids [1, n] → L + 1 tensors [n, H] in most families, the last of them normed. Empty where the model gives none."""
    states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    return [state[0] for state in states or ()]
