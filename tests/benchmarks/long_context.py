"""Peak memory of a rank that trains on one long pack, by how many ranks share it and whether activations are made again.

    python -m tests.benchmarks.long_context [--tokens 16384] [--drafters eagle3 mtp dflash] [--context 1 2 4]

Eight documents; small widths, since it is rows that are many here. What is measured is what one forward and backward add to
a process that holds weights, target and (the first rank of a group) the pack's features: VmHWM of Linux, the largest of the
ranks.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data_pipelines.features import Features, FeatureSpec
from data_pipelines.packing import Document, Pack
from tests.trainer.parallel.ranks import on_ranks
from trainer import losses
from trainer.batch import Batch
from trainer.drafters import blocks, build_drafter
from trainer.drafters.dflash import DFlashConfig
from trainer.drafters.dspark import DSparkConfig
from trainer.drafters.eagle3 import Eagle3Config
from trainer.drafters.mtp import MTPConfig
from trainer.parallel import ParallelConfig, World
from trainer.parallel.context import ContextGroup, SharedPacks
from trainer.target import FrozenTarget

TARGET = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=1 << 20, tie_word_embeddings=False,
)  # fmt: skip
DRAFTERS = {
    "eagle3": Eagle3Config(steps=4),
    "mtp": MTPConfig(steps=3),
    "mtp-own-step": MTPConfig(steps=3, attention="own_step"),
    "dflash": DFlashConfig(num_layers=3, block_size=8, mask_token=3, anchors=1024),
    "dspark": DSparkConfig(num_layers=3, block_size=8, mask_token=3, anchors=1024, markov_rank=16),
}
TAPS, DOCUMENTS = 3, 8
# What is worked on at once is bounded by constants for real widths; for these, bounds that do not hide the rest.
CHUNK_ELEMENTS, CHUNK_SCORES = 1 << 18, 1 << 21


class OnePack:
    """A prefetcher that has one pack."""

    wait_seconds = 0.0

    def __init__(self, tokens: int, features: bool):
        rng, n, generator = np.random.default_rng(0), tokens // DOCUMENTS, torch.Generator().manual_seed(0)
        answers = np.arange(n) >= n // 8
        documents = (
            Document(rng.integers(0, TARGET.vocab_size, n).astype(np.int32), answers) for _ in range(DOCUMENTS)
        )
        self._pack = Pack(tuple(documents))
        if features:
            shapes = ((tokens, TAPS, TARGET.hidden_size), (tokens, TARGET.hidden_size))
            self._features = Features(*(torch.randn(*shape, generator=generator) for shape in shapes))

    def __iter__(self):
        return iter([(0, self._pack)])

    def next(self, _=None):
        return 0, self._pack, self._features


def measured(world: World, name: str, tokens: int, recompute: bool) -> SimpleNamespace:
    """MiB that a forward and backward add at their peak, and the loss."""
    losses.CHUNK_ELEMENTS, blocks.CHUNK_SCORES = CHUNK_ELEMENTS, CHUNK_SCORES
    torch.manual_seed(1)
    frozen = FrozenTarget(LlamaForCausalLM(TARGET).requires_grad_(False))
    drafter = build_drafter(DRAFTERS[name], TARGET, None)
    drafter.recompute = recompute
    context = ContextGroup.of(world, ParallelConfig(context=world.size))
    packs = one = OnePack(tokens, context.fetches)
    if context.size > 1:
        spec = FeatureSpec("random", tuple(range(TAPS)), TARGET.hidden_size, "float32")
        packs = SharedPacks(context, one if context.fetches else None, iter(one), spec, drafter.lookahead_rows)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = _status("VmRSS")
    index, pack, features = packs.next()
    batch = Batch.of(pack, features, dtype=torch.float32, device="cpu", address=(index,), part=context.part)
    del features
    weights = torch.full((drafter.depth,), 1 / tokens)
    loss, _ = drafter(batch, drafter.targets(batch, frozen), frozen, weights)
    loss.backward()
    return SimpleNamespace(mib=(_status("VmHWM") - before) / 1024, loss=float(world.sum(loss.detach())))


def _status(key: str) -> int:
    """In KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--drafters", nargs="*", default=list(DRAFTERS), choices=DRAFTERS)
    parser.add_argument("--context", nargs="*", type=int, default=[1, 2, 4])
    options = parser.parse_args()
    print(
        f"{options.tokens} tokens, peak MiB of a rank\n\n| drafter | recompute | ranks | MiB | loss |\n|---|---|---|---|---|"
    )
    for name, recompute, ranks in itertools.product(options.drafters, (False, True), options.context):
        each = on_ranks(ranks, measured, name, options.tokens, recompute)
        print(f"| {name} | {recompute} | {ranks} | {max(r.mib for r in each):.0f} | {each[0].loss:.6f} |", flush=True)


if __name__ == "__main__":
    main()
