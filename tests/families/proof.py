"""A target that is said to fit, shown to fit by its own forward alone."""

from __future__ import annotations

from pathlib import Path

import torch

from data_pipelines.engines import Target
from data_pipelines.engines.transformers import TransformersEngine
from data_pipelines.features import FeatureSpec
from trainer.target import FrozenTarget

from .truth import load_whole, ordinary_tokens, own_hidden_states, own_logits

LIMIT = 1e-4  # of a logit, absolute; of a state, as a share of the largest
_FIRST, _SECOND = 9, 14  # documents, in tokens


def prove(folder: Path, *, tapped: bool) -> None:
    """A producer's features of two packed documents, turned into logits by a rank, are the model's own logits of each
    document alone; the taps are its own hidden states; later tokens change no earlier logits."""
    target, whole = Target(str(folder), folder.name), load_whole(folder)
    documents = [ordinary_tokens(n, seed=n) for n in (_FIRST, _SECOND)]
    real = [own_logits(whole, ids) for ids in documents]
    early = own_logits(whole, documents[1][:, :_FIRST])
    assert (early - real[1][:_FIRST]).abs().max() <= LIMIT, "reads tokens that come later: not a causal model"

    depth = target.config.num_hidden_layers
    spec = FeatureSpec("proof", tuple(range(depth)) if tapped else (), target.config.hidden_size, "float32")
    features = TransformersEngine(target, spec, whole).compute(torch.cat(documents, 1)[0].numpy(), (_FIRST, _SECOND))
    frozen = FrozenTarget.load(target, torch.float32)
    with torch.no_grad():
        ours = frozen.readout.logits(frozen.normed(features.final))
    assert (ours - torch.cat(real)).abs().max() <= LIMIT

    states = own_hidden_states(whole, documents[1]) if tapped else []
    taps = features.taps[_FIRST:].unbind(1)  # of the second document
    if depth > 1 and states and not _equal(taps[0], states[0]) and _equal(taps[1], states[0]):
        taps = taps[1:]  # a list that begins after the first layer (Mamba)
    for k, (tap, state) in enumerate(zip(taps, states)):
        assert _equal(tap, state), f"tap {k}"


def _equal(ours: torch.Tensor, real: torch.Tensor) -> bool:
    return bool(ours.shape == real.shape and (ours - real).abs().max() <= LIMIT * real.abs().max())
