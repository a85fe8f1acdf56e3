"""The MTP heads that some targets bring along in their checkpoint: their tensors' names, and reading them.

Two styles, as published:
* `mtp.*` (Qwen3-Next, Qwen3.5): fc, pre_fc_norm_embedding, pre_fc_norm_hidden, norm, and the layer as `layers.0.*`;
* `model.layers.{L+k}.*` behind the last decoder layer L-1 (DeepSeek-V3, GLM-4.5): eh_proj, enorm, hnorm, shared_head.norm,
  the layer's own names, and copies of the embedding and the head, which stay the target's.

Both project [embedding; hidden]. Experts are stored one by one and live fused in transformers' modules.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from data_pipelines.engines import Target
from data_pipelines.errors import UserError

_EXPERT = re.compile(r"(.*experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
_QWEN = {
    "fc.": "input_proj.",
    "norm.": "final_layernorm.",
    "pre_fc_norm_hidden.": "hidden_layernorm.",
    "pre_fc_norm_embedding.": "token_layernorm.",
    "layers.0.": "",
}
_DEEPSEEK = {"eh_proj.": "input_proj.", "enorm.": "token_layernorm.", "hnorm.": "hidden_layernorm."}
_DEEPSEEK |= {"shared_head.norm.": "final_layernorm."}


def checkpoint_files(folder: Path) -> dict[str, Path]:
    """Name of every tensor of a checkpoint → its file."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            files.update(dict.fromkeys(file.keys(), path))
    return files


def native_names(names, num_layers: int) -> list[dict[str, str]]:
    """Of each head in a checkpoint with these tensor names: checkpoint name → a module's name, experts one by one."""
    heads: dict[int, dict[str, str]] = {}
    for name in names:
        if match := re.fullmatch(r"mtp\.(.*)", name):
            head, rest, table = 0, match[1], _QWEN
        elif (match := re.fullmatch(r"(?:.*\.)?layers\.(\d+)\.(.*)", name)) and int(match[1]) >= num_layers:
            head, rest, table = int(match[1]) - num_layers, match[2], _DEEPSEEK
        else:
            continue
        if rest not in _COPIES:
            prefix = next((p for p in table if rest.startswith(p)), "")
            heads.setdefault(head, {})[name] = table.get(prefix, "") + rest.removeprefix(prefix)
    # (Towers of multimodal targets have layers with high numbers, too; without the projection it is no head.)
    return [heads[k] for k in sorted(heads) if "input_proj.weight" in heads[k].values()]


def read_native_heads(target: Target, module: nn.Module) -> list[dict[str, torch.Tensor]]:
    """The heads of the target's checkpoint, each as a state dict of such a module; [] when it has none.

    Raises UserError when a head is not of the module's shape: quantised, or of a kind that is not known here.
    """
    files = checkpoint_files(Path(target.path))
    wanted = {name: tensor.shape for name, tensor in module.state_dict().items()}
    heads = []
    for names in native_names(files, target.config.num_hidden_layers):
        head = {}
        for native, name in names.items():
            with safe_open(files[native], "pt") as file:
                head[name] = file.get_tensor(native).float()
        head = fuse_experts(head)
        differing = sorted(n for n in {*wanted, *head} if n not in head or wanted.get(n) != head[n].shape)
        if differing:
            raise UserError(
                f"the target's own MTP head is not one that is known here: {', '.join(differing[:6])}",
                where=target.path,
                fix="set drafter.warm_start=never to begin with fresh weights (a quantised head has to be dequantised)",
            )
        heads.append(head)
    return heads


def fuse_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """E experts' gate_proj, up_proj [I, H] and down_proj [H, I] → gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""
    fused = {name: tensor for name, tensor in tensors.items() if not _EXPERT.fullmatch(name)}
    experts: dict[str, dict[tuple[str, int], torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(match[1], {})[match[3], int(match[2])] = tensor
    for prefix, parts in experts.items():
        gate, up, down = (
            torch.stack([parts[key] for key in sorted(parts) if key[0] == kind])
            for kind in ("gate_proj", "up_proj", "down_proj")
        )
        fused |= {f"{prefix}.gate_up_proj": torch.cat([gate, up], 1), f"{prefix}.down_proj": down}
    return fused


def split_experts(tensors: dict[str, torch.Tensor], names) -> dict[str, torch.Tensor]:
    """The inverse of `fuse_experts`, for the names that a checkpoint uses."""
    split = {}
    for name in names:
        if name in tensors:
            split[name] = tensors[name]
        elif match := _EXPERT.fullmatch(name):
            prefix, expert, kind = match[1], int(match[2]), match[3]
            if kind == "down_proj":
                split[name] = tensors[f"{prefix}.down_proj"][expert]
            else:
                gate_up = tensors[f"{prefix}.gate_up_proj"][expert].chunk(2)
                split[name] = gate_up[kind == "up_proj"]
    return split
