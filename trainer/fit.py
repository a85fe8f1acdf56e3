"""Does a target fit? Everything that a run would find out about it, before there is a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.initialization import no_init_weights

from data_pipelines.conversations.rendering import stop_ids
from data_pipelines.conversations.templates import check_template
from data_pipelines.engines import Target
from data_pipelines.engines.anatomy import tap_hidden_states
from data_pipelines.engines.probe import Finding, guarded, probe
from data_pipelines.engines.readout import error_limit, random_tokens, relative_error
from data_pipelines.engines.transformers import TransformersEngine
from data_pipelines.features import FeatureSpec

from .decoding.chain import decode_chain, decode_plain
from .drafters import DRAFTERS, Committed, Contract, build_drafter
from .target import FrozenTarget

_TRAINED_BYTES = 16  # of a trained parameter: master, gradient, two moments, float32 each


@dataclass
class Fit:
    """What `check_target` found. drafters: of each, None or why it does not build. memory_bytes: of the weights alone, by
    role; a rank's by drafter. logit_difference: the largest absolute one between the whole model's logits and a rank's."""

    target: str
    family: str = ""
    model_class: str = ""
    parameters: int = 0
    dtype: str = ""
    findings: list[Finding] = field(default_factory=list)
    drafters: dict[str, str | None] = field(default_factory=dict)
    memory_bytes: dict[str, int] = field(default_factory=dict)
    logit_difference: float | None = None

    @property
    def fits(self) -> bool:
        """Whether some drafter can be trained for it. (A target without a judge or a chat template can be trained for.)"""
        found = {finding.name: finding.fits for finding in self.findings}
        exact = all(found.get(name, False) for name in ("model", "logits", "embedding", "rank"))
        return exact and any(why is None for why in self.drafters.values())

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits}


def check_target(target: Target, dtype: torch.dtype = torch.float32) -> Fit:
    """Compare everything that a run takes for granted with the target itself, loaded whole in `dtype`. Never raises for a
    target that does not fit: what went wrong is a finding."""
    fit = Fit(target.name, dtype=str(dtype).removeprefix("torch."))
    loaded: list[nn.Module] = []
    fit.findings.append(guarded("model", _load, target, dtype, fit, loaded))
    if not loaded:
        return fit
    model = loaded[0]
    fit.findings += probe(model)
    tapped = all(finding.fits for finding in fit.findings if finding.name == "taps")
    fit.findings += [
        guarded("packing", _packing, target, model, fit.dtype, tapped),
        guarded("rank", _rank, target, model, dtype, fit),
    ]
    tokenizer: list[Any] = []
    fit.findings.append(guarded("template", _template, target, model, tokenizer))
    for name in DRAFTERS:
        fit.drafters[name] = _why_not(name, target, tokenizer, tapped, fit)
    fit.findings.append(guarded("judge", _judge, model))
    return fit


def _load(target: Target, dtype: torch.dtype, fit: Fit, loaded: list[nn.Module]) -> Finding:
    fit.family = target.whole_config.model_type
    loaded.append(target.load_model(dtype))
    model = loaded[0]
    fit.model_class = type(model).__name__
    fit.parameters = sum(p.numel() for p in model.parameters())
    fit.memory_bytes["producer"] = sum(p.numel() * p.element_size() for p in model.parameters())
    fit.memory_bytes["judge, float32"] = 4 * fit.parameters
    config = target.config
    shape = f"{config.num_hidden_layers} layers of {config.hidden_size}, vocabulary {config.vocab_size:,}"
    return Finding("model", True, f"{fit.model_class}: {shape}")


def _packing(target: Target, model: nn.Module, dtype: str, tapped: bool) -> Finding:
    depth = target.config.num_hidden_layers
    spec = FeatureSpec(target.fingerprint, (depth // 2,) if tapped else (), target.config.hidden_size, dtype)
    return TransformersEngine(target, spec, model).packing


@torch.no_grad()
def _rank(target: Target, model: nn.Module, dtype: torch.dtype, fit: Fit) -> Finding:
    """What a rank makes of the final states, with three modules of the checkpoint, against the whole model's logits."""
    device = next(model.parameters()).device
    frozen = FrozenTarget.load(target, dtype, device)
    ids = random_tokens(model, 24, seed=4)
    with tap_hidden_states(model, ()) as recorder:
        real = model(input_ids=ids, use_cache=False).logits[0].float()
    ours = frozen.readout.logits(frozen.normed(recorder.final[0])).float()
    fit.logit_difference = float((ours - real).abs().max())
    error, limit = relative_error(ours, real), error_limit(dtype)
    says = f"logits from embedding, norm and head alone differ by at most {fit.logit_difference:.2g}"
    return Finding("rank", error <= limit, says, error, limit)


def _template(target: Target, model: nn.Module, tokenizer: list[Any]) -> Finding:
    tokenizer.append(target.load_tokenizer())
    size, rows = len(tokenizer[0]), target.config.vocab_size
    if size > rows:
        return Finding("template", False, f"the tokenizer has {size:,} tokens, the embedding {rows:,} rows")
    check_template(tokenizer[0])
    source = str(tokenizer[0].chat_template)
    facts = [f"answers end with {', '.join(map(repr, _stops(tokenizer[0], model)))}"]
    if "reasoning" in source or "think" in source:
        facts.append("knows reasoning")
    if "enable_thinking" in source:
        facts.append("takes enable_thinking")
    if "tools" in source:
        facts.append("knows tools")
    return Finding("template", True, "; ".join(facts))


def _stops(tokenizer: Any, model: nn.Module) -> list[str]:
    ids = stop_ids(tokenizer, getattr(model, "generation_config", None))
    return [str(token) for token in tokenizer.convert_ids_to_tokens(ids)]


def _why_not(name: str, target: Target, tokenizer: list[Any], tapped: bool, fit: Fit) -> str | None:
    """None if the drafter with its default shape can be built; its memory goes into `fit`."""

    def build() -> Finding:
        config = DRAFTERS[name].Config()
        if tokenizer:
            config = config.completed(tokenizer[0], target.config.vocab_size)
        elif hasattr(config, "mask_token"):  # which one does not matter here
            config.mask_token = 0
        taps = DRAFTERS[name].contract(config, target.config.num_hidden_layers).taps
        if taps and not tapped:
            return Finding(name, False, "it reads taps, and those of this target are not what they should be")
        with torch.device("meta"), no_init_weights():
            drafter = build_drafter(config, target.config, None)
        trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
        fit.memory_bytes[f"rank, {name}"] = _TRAINED_BYTES * trained
        return Finding(name, True, f"{trained:,} parameters")

    finding = guarded(name, build)
    return None if finding.fits else finding.says


class _Guesses:
    """Drafts at random, so that the judge has something to reject at every slot."""

    config = None

    def __init__(self, vocab_size: int):
        self._vocab_size, self._draws = vocab_size, torch.Generator().manual_seed(5)

    def contract(self, config: Any, num_layers: int) -> Contract:
        return Contract(())

    def new_state(self, batch_size: int) -> _Guesses:
        return self

    def select(self, sequences: torch.Tensor) -> None:
        """Nothing is kept of a sequence."""

    def propose(self, state: _Guesses, rows: Committed, frozen: FrozenTarget, k: int) -> torch.Tensor:
        return torch.randint(self._vocab_size, (len(rows.valid), k), generator=self._draws)


def _judge(model: nn.Module) -> Finding:
    """Two prompts of different lengths, decoded speculatively and plainly."""
    prompts = [random_tokens(model, n, seed=n)[0].tolist() for n in (5, 9)]
    plain = decode_plain(model, prompts, max_new_tokens=10)
    frozen = FrozenTarget(model)
    guesses: Any = _Guesses(len(frozen.head_weight))
    drafted = decode_chain(model, prompts, guesses, frozen, draft_tokens=3, max_new_tokens=10)
    same = [a.tokens == b.tokens for a, b in zip(plain, drafted)]
    if all(same):
        return Finding("judge", True, "decodes speculatively, token for token as plainly")
    if next(model.parameters()).dtype != torch.float32:
        return Finding("judge", True, "texts differ where logits nearly tie, as they may below float32")
    return Finding("judge", False, "speculative decoding does not write what plain decoding writes")
