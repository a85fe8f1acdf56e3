"""config.json of an export, ours or another's → one with every key that this project reads, or a refusal in words.

What is missing is what the config classes of speculators 0.9.0 take it for; `transformer_layer_config` is completed by the
transformers config class that it names, so that each key of it is there.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from data_pipelines.errors import UserError

from ..drafters import DRAFTERS
from ..drafters.shape import LAYER_KEYS

_COMMON = {"draft_vocab_size": 32000, "target_hidden_size": None}
_BLOCKS = {
    **_COMMON,
    "block_size": 8,
    "aux_hidden_state_layer_ids": None,
    "mask_token_id": None,
    "sliding_window_non_causal": False,
    "sample_from_anchor": False,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "eagle3": {
        **_COMMON,
        "eagle_aux_hidden_state_layer_ids": None,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
    },
    "dflash": _BLOCKS,
    "dspark": {
        **_BLOCKS,
        "sample_from_anchor": True,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "mtp": {"num_nextn_predict_layers": 1, "hidden_kind": "post_norm"},
}
_MTP_TOKENS = 3  # where there is no speculators_config
_TAPS = {"eagle3": "eagle_aux_hidden_state_layer_ids"}  # of the others: aux_hidden_state_layer_ids
# What stands where there is no value that tells the type.
_KINDS: dict[str, tuple[type, ...]] = {"target_hidden_size": (int,), "mask_token_id": (int,)}
_LAYER_CLASSES = {"mtp": "qwen2"}  # of a transformer_layer_config that does not say: qwen3 otherwise
_SHAPE = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "hidden_act")
_ATTENDING = {"eagle3": ("llama", "qwen3")}  # the layers that there are; block drafters always have Qwen3's


def complete(exported: dict[str, Any], target_config, where: str) -> dict[str, Any]:
    """exported: a config.json as it stands. target_config: the text config of the target that it is to draft for.

    Raises UserError on a drafter of another kind, a value of another type, layers that are not built here, and an
    export for a target of another shape.
    """
    name = exported.get("speculators_model_type")
    if name in DRAFTERS and name not in DEFAULTS:  # of a plug-in, which reads its own
        return exported
    if name not in DEFAULTS:
        raise UserError(
            f"speculators_model_type is {name!r}, not one of {', '.join(DEFAULTS)}",
            where=where,
            fix="this is not an export in the format of speculators"
            if name is None
            else "a drafter of your own needs --plugins <module that registers it>",
        )
    whole = {**exported, **{key: _value(exported, key, default, where) for key, default in DEFAULTS[name].items()}}
    whole["transformer_layer_config"] = layer = _layer(exported, name, where)
    _check_target(whole, layer, target_config, where)
    if name == "mtp":
        _check_family(layer, target_config, where)
        return {**whole, "speculative_tokens": proposed_tokens(exported) or _MTP_TOKENS}
    key = _TAPS.get(name, "aux_hidden_state_layer_ids")
    layers = target_config.num_hidden_layers
    taps = whole[key] or [2, layers // 2, layers - 3]  # as speculators fills it in
    if not _is_list_of_ints(taps) or taps != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] <= layers:
        raise UserError(
            f"{key} is {taps}; engines read distinct layers of the target in ascending order, 0…{layers}",
            where=where,
            fix="this drafter is for another target, or was trained on layers in an order that no engine gives",
        )
    return {**whole, key: taps}


def own_layer(layer: dict[str, Any], name: str) -> dict[str, Any]:
    """What `drafter.layer` has to be for layers of this (completed) transformer_layer_config."""
    kind = layer["model_type"] if name in _ATTENDING else "qwen3"
    return {**{key: layer[key] for key in LAYER_KEYS}, "model_type": kind}


def proposed_tokens(exported: dict[str, Any]) -> int | None:
    """How many tokens an engine is told to draft a round."""
    try:
        return int(exported["speculators_config"]["proposal_methods"][0]["speculative_tokens"])
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def verifier_name(exported: dict[str, Any]) -> str:
    """What the export calls the target that it was made for; empty if it does not say."""
    try:
        return exported["speculators_config"]["verifier"]["name_or_path"] or ""
    except (KeyError, TypeError):
        return ""


def _value(exported: dict[str, Any], key: str, default: Any, where: str) -> Any:
    value = exported.get(key, default)
    if value is None:
        value = default
    if value is None or key.endswith("layer_ids"):
        return value
    kinds = _KINDS.get(key) or (type(default),)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise UserError(f"{key} is {value!r}, which is no {kinds[0].__name__}", where=where, fix="put the export right")
    return value


def _layer(exported: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    given = exported.get("transformer_layer_config")
    if not isinstance(given, dict):
        raise UserError(
            "config.json has no transformer_layer_config: nothing says of which shape the drafter's layers are",
            where=where,
            fix="export it again",
        )
    kind = given.get("model_type", _LAYER_CLASSES.get(name, "qwen3"))
    allowed = _ATTENDING.get(name)
    if allowed and kind not in allowed:
        raise UserError(
            f"transformer_layer_config.model_type is {kind!r}; layers of {name} are {' or '.join(allowed)} layers",
            where=where,
        )
    try:
        layer = AutoConfig.for_model(
            kind, **{key: value for key, value in given.items() if key != "model_type"}
        ).to_dict()
    except Exception as error:  # each family's class has checks of its own
        raise UserError(
            f"transformer_layer_config is not a {kind} config: {str(error).splitlines()[0]}", where=where
        ) from error
    if name == "mtp":
        return layer
    for key in (*_SHAPE, *LAYER_KEYS):
        if layer.get(key) is None:
            raise UserError(f"transformer_layer_config of a {kind} drafter has no {key}", where=where)
    rope = layer["rope_parameters"]
    rope = dict(rope.get("sliding_attention", rope))  # one set for all layers; of two kinds speculators takes this one
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(
            "transformer_layer_config rotates a part of each head only, which is not built here", where=where
        )
    for key in ("attention_bias", "mlp_bias"):
        if layer.get(key):
            raise UserError(
                f"transformer_layer_config.{key} is true; layers with a bias are not built here", where=where
            )
    return {**layer, "rope_parameters": rope, "layer_types": layer.get("layer_types") or []}


def _check_target(whole: dict[str, Any], layer: dict[str, Any], target_config, where: str) -> None:
    made_for = f"this drafter was made for another target{f' ({name})' if (name := verifier_name(whole)) else ''}"
    for key in ("hidden_size", "vocab_size"):
        theirs, ours = layer.get(key), getattr(target_config, key)
        if theirs != ours:
            raise UserError(
                f"{made_for}: its {key} is {theirs}, and this target's is {ours}",
                where=where,
                fix="choose the target that it belongs to, or another drafter",
            )
    wide = whole.get("target_hidden_size")
    if wide is not None and wide != target_config.hidden_size:
        raise UserError(f"{made_for}: its target_hidden_size is {wide}, not {target_config.hidden_size}", where=where)
    size = whole.get("draft_vocab_size", target_config.vocab_size)
    if not 0 < size <= target_config.vocab_size:
        raise UserError(
            f"draft_vocab_size is {size}, and the target has {target_config.vocab_size} tokens", where=where
        )


def _check_family(layer: dict[str, Any], target_config, where: str) -> None:
    """An MTP head is a layer of its target's own family and shape."""
    ours = target_config.to_dict()
    for key in (*LAYER_KEYS, *_SHAPE):
        if layer.get(key) != ours.get(key) and key in layer and key in ours:
            raise UserError(
                f"an MTP head is a layer of its target: {key} is {layer[key]} there, and {ours[key]} in this target",
                where=where,
                fix="choose the target that it belongs to",
            )


def _is_list_of_ints(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, int) and not isinstance(x, bool) for x in value)
