"""A drafter ↔ the standard speculator format: a folder with config.json and model.safetensors that engines load.

The keys that every drafter has are written here; a drafter adds its own keys and its map of tensors (`export_config`,
`export_tensors`) and reads its keys back (`config_from_export`; see `reading`). The format is that of speculators 0.9; vLLM
reads it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file

from data_pipelines.engines import Target
from data_pipelines.errors import UserError

from ..drafters import Drafter
from ..target import FrozenTarget
from .config import ExportConfig
from .folder import whole_folder
from .saved import read_export

FORMAT_VERSION = "0.9.0"  # of speculators, whose keys these are


def export_drafter(
    drafter: Drafter,
    frozen: FrozenTarget,
    target: Target,
    cfg: ExportConfig,
    out: Path,
    speculative_tokens: int,
) -> Path:
    """Write `out`/config.json and `out`/model.safetensors. The folder appears whole, in place of an earlier export.

    drafter: with its whole (unsharded) weights. speculative_tokens: how many an engine drafts a round by default.
    Returns `out`. Raises UserError on weights that are not finite, or a disk that takes no more.
    """
    config = {
        **drafter.export_config(frozen),
        "speculators_version": FORMAT_VERSION,
        "speculators_config": {
            "algorithm": drafter.config.name,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": cfg.verifier or target.name, "architectures": target.architectures},
        },
        "dtype": cfg.dtype,
        "tie_word_embeddings": False,
        "transformers_version": transformers.__version__,
    }
    tensors = {name: _stored(name, t, cfg.dtype) for name, t in drafter.export_tensors(frozen).items()}
    out = Path(out)
    try:
        with whole_folder(out) as folder:
            (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"cannot write the export: {error}", where=str(out), fix="free some space, export again"
        ) from error
    return out


def load_export(path: Path, target_config) -> Drafter:
    """The drafter that an export holds, in fp32, in eval mode: configured by the keys, and with the tensors, that
    engines read. (A head that is a part of the drafter is therefore the exported one, also if it was never trained.)

    target_config: the text config of the target that it drafts for.
    Raises UserError if the folder is not a whole export, or not of this target's shape.
    """
    return read_export(Path(path), target_config).build(target_config)


def _stored(name: str, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """A copy of its own (tied weights may not share memory in the file), on the CPU, floats in the stored dtype."""
    tensor = tensor.detach().cpu()
    if tensor.is_floating_point():
        tensor = tensor.to(getattr(torch, dtype))
        if not torch.isfinite(tensor).all():
            raise UserError(f"{name} holds values that are not finite in {dtype}: this drafter must not leave")
    return tensor.contiguous().clone()
