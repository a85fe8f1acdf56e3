"""Tiny random models of every family of transformers that writes text, saved as checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from .overrides import OVERRIDES
from .shrink import tiny_config


@dataclass(frozen=True)
class Family:
    """model_type and model class, as transformers' auto classes map them. multimodal: the class is a wrapper of towers."""

    model_type: str
    model_class: str
    multimodal: bool

    def __str__(self) -> str:
        return f"{self.model_type}-{self.model_class}"


def all_families() -> list[Family]:
    causal = [Family(k, c, False) for k, c in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()]
    wrappers = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    known = {(family.model_type, family.model_class) for family in causal}
    return causal + [Family(k, c, True) for k, c in wrappers.items() if (k, c) not in known]


def build(family: Family, seed: int = 0) -> PreTrainedModel:
    """A random model, float32. Raises whatever the family's own code raises."""
    model_class = getattr(transformers, family.model_class)
    config = tiny_config(model_class.config_class, OVERRIDES.get(family.model_class, {}))
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    roughen(model)
    return model


@torch.no_grad()
def roughen(model: nn.Module) -> None:
    """Weights for which every norm, bias and matrix matters: those of an untrained model are ones, zeros and nearly zero."""
    for name, p in model.named_parameters():
        if not p.is_floating_point():
            continue
        if p.dim() < 2:
            p.add_(torch.randn_like(p) * (0.5 if name.endswith("bias") and "dt_" not in name else 0.3))
        elif p.std() < 1e-6:
            p.add_(torch.randn_like(p) * 0.1)
        elif p.std() < 0.1:
            p.mul_(p.shape[-1] ** -0.5 / p.std())


def save(family: Family, folder: Path, seed: int = 0) -> None:
    transformers.logging.disable_progress_bar()
    build(family, seed).save_pretrained(folder)
