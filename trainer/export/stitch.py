"""A trained MTP head → a copy of the target's own checkpoint with its MTP head replaced, under the same names.

Engines that serve a target with its native head (`{"method": "mtp"}` in vLLM, `use_mtp=True` in transformers) serve the
copy as they served the original.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from data_pipelines.engines import Target
from data_pipelines.errors import UserError

from ..drafters.mtp import MTP
from ..drafters.native_mtp import checkpoint_files, native_names, split_experts
from .folder import whole_folder


def stitch(drafter: MTP, target: Target, out: Path) -> Path:
    """Copies the target's folder to `out`, with the MTP tensors of its files replaced; the folder appears whole.

    A checkpoint with one head takes a shared module; one with n heads takes n chained modules, or the shared one n times.
    Tensors keep their stored dtype. Raises UserError when the target has no head of its own, the numbers do not match, the
    drafter reads the pre-norm state (engines give the post-norm one), or the disk takes no more.
    """
    out, source = Path(out), Path(target.path)
    files = checkpoint_files(source)
    heads = native_names(files, target.config.num_hidden_layers)
    modules = drafter.module_tensors()
    modules = modules * len(heads) if len(modules) == 1 else modules
    if not heads or len(modules) != len(heads):
        raise UserError(
            f"the target's checkpoint has {len(heads)} MTP heads and this drafter {len(modules)} modules",
            where=str(source),
            fix="export in the speculators format instead"
            if not heads
            else "train drafter.form=shared for this target",
        )
    if drafter.config.hidden != "post_norm":
        raise UserError(
            "engines give an MTP head the target's state after its final norm, and this drafter was trained on the other one",
            fix="train with drafter.hidden=post_norm",
        )
    new: dict[Path, dict[str, torch.Tensor]] = defaultdict(dict)
    for names, tensors in zip(heads, modules):
        stored = split_experts(tensors, names.values())
        for native, name in names.items():
            if name not in stored:
                raise UserError(f"the drafter has nothing for {native}", where=str(source))
            new[files[native]][native] = stored[name]
    try:
        with whole_folder(out) as folder:
            shutil.copytree(source, folder, dirs_exist_ok=True)
            for file, tensors in new.items():
                _replace(folder / file.relative_to(source), tensors)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write the checkpoint: {error}", where=str(out), fix="free some space") from error
    return out


def _replace(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    whole = load_file(file)
    for name, tensor in tensors.items():
        if whole[name].shape != tensor.shape:
            raise UserError(f"{name} is {tuple(tensor.shape)} and {tuple(whole[name].shape)} in the checkpoint")
        stored = tensor.detach().cpu().to(whole[name].dtype)
        if not torch.isfinite(stored).all():
            raise UserError(f"{name} holds values that are not finite: this drafter must not leave")
        whole[name] = stored.contiguous().clone()
    save_file(whole, file, metadata=metadata)
