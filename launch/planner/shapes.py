"""The target's and the drafter's parameters, counted on models that take no memory: transformers' own model of a config, and
this project's drafters, on torch's meta device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from data_pipelines.engines.anatomy import anatomy, text_config
from data_pipelines.engines.targets import TargetConfig, resolve_target
from data_pipelines.errors import UserError
from trainer.drafters import Drafter, DrafterConfig, build_drafter
from trainer.drafters.cost import AttentionShape, attention_shapes, is_routed, matrix_elements, routed_share

TABLE = Path(__file__).with_name("targets.yaml")
# What resolve_target would convert or build on this machine: their shapes are known without it.
SMOLLM2 = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class TargetShape:
    """A target, counted. matrices: elements of the weight matrices that one token is multiplied with in the decoder layers
    (of the routed experts, those that it is sent to). outside: parameters that are not in decoder layers (embedding, head,
    final norm, a vision tower): what a trainer rank loads. stored_bytes: of the weights as they are published.
    """

    name: str
    config: Any
    parameters: int
    active: int
    embedding: int
    matrices: int
    outside: int
    stored_bytes: int
    attention: tuple[AttentionShape, ...]
    source: str

    @property
    def hidden(self) -> int:
        return self.config.hidden_size

    @property
    def vocabulary(self) -> int:
        return self.config.vocab_size


def target_shape(target: TargetConfig) -> TargetShape:
    """Of a folder with config.json, of a model made on this machine, or of a row of the table.

    Raises UserError for a hub id that the table does not have: nothing is downloaded for a plan.
    """
    if target.kind == "smollm2_135m":
        return count_target("HuggingFaceTB/SmolLM2-135M-Instruct", _config(SMOLLM2), None, "its config.json")
    if target.kind == "tiny":
        path = resolve_target(target).path
        return count_target("draftsmith/tiny", AutoConfig.from_pretrained(path), None, "made here")
    folder = Path(target.path).expanduser()
    if (folder / "config.json").is_file():
        try:
            config = AutoConfig.from_pretrained(folder)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"not a model that transformers knows: {error}", where=str(folder)) from error
        return count_target(target.path, config, _stored_bytes(folder), str(folder / "config.json"))
    rows = _table()
    if target.path not in rows:
        raise UserError(
            f"the planner's table has no target '{target.path}'",
            fix="target.path=<a folder with its config.json>; the table has " + ", ".join(rows),
        )
    return table_target(target.path)


@cache
def table_target(name: str) -> TargetShape:
    row = _table()[name]
    return count_target(name, _config(row["config"]), row["bytes"], row["source"])


@cache
def _table() -> dict[str, dict]:
    return yaml.safe_load(TABLE.read_text(encoding="utf-8"))


def _config(values: dict[str, Any]):
    values = dict(values)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def _stored_bytes(folder: Path) -> int | None:
    """Of the weights beside a config.json, if they are there."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None


def count_target(name: str, config, stored: dict[str, float] | int | None, source: str) -> TargetShape:
    """stored: bytes of the weights, or of one parameter {experts, other}; None for two bytes each."""
    text = text_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = anatomy(model).layers
    share = routed_share(text)
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for n, p in model.named_parameters() if is_routed(n, p))
    if not isinstance(stored, int):
        rates = stored or {"experts": 2, "other": 2}
        stored = math.ceil(experts * rates["experts"] + (total - experts) * rates["other"])
    return TargetShape(
        name=name,
        config=text,
        parameters=total,
        active=round(total - experts * (1 - share)),
        embedding=text.vocab_size * text.hidden_size,
        matrices=sum(matrix_elements(layer, share) for layer in layers),
        outside=total - sum(p.numel() for p in layers.parameters()),
        stored_bytes=stored,
        attention=attention_shapes(text),
        source=source,
    )


def draft_shape(config: DrafterConfig, target: TargetShape) -> Drafter:
    """The drafter of a config, on the meta device: shapes without memory."""
    size, whole = config.draft_vocab_size, target.vocabulary
    if size > whole:
        raise UserError(f"drafter.draft_vocab_size={size} is larger than the target's vocabulary, {whole}")
    if getattr(config, "mask_token", 0) < 0:
        config.mask_token = 0  # which one is chosen with the tokenizer; it changes no shape
    with torch.device("meta"):
        kept = torch.arange(size) if 0 < size < whole else None
        return build_drafter(config, target.config, kept).to("meta")
