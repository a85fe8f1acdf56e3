"""Ranks that share a pack train what one rank would: losses, metrics and gradients of every drafter, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from data_pipelines.errors import UserError
from data_pipelines.features import Features, FeatureSpec
from data_pipelines.packing import Document, Pack
from data_pipelines.stream.consumer import Prefetcher
from trainer.batch import Batch, Part, round_counts
from trainer.checkpoint import CheckpointConfig, Checkpointer, load_checkpoint
from trainer.config import load_config
from trainer.drafters import build_drafter
from trainer.drafters.attention import RolloutAttention
from trainer.drafters.blocks import draw_anchors
from trainer.drafters.dflash import DFlash, DFlashConfig
from trainer.drafters.dspark import DSparkConfig
from trainer.drafters.eagle3 import Eagle3Config
from trainer.drafters.mtp import MTPConfig
from trainer.loop import Trainer
from trainer.parallel import ParallelConfig
from trainer.parallel.context import ContextGroup, SharedPacks
from trainer.reporting import Progress
from trainer.target import FrozenTarget

from .ranks import on_ranks
from .runs import SIZE, TAPS, optim, spread

TARGET = LlamaConfig(
    vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=8, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=128, tie_word_embeddings=False,
)  # fmt: skip
BLOCKS = {"num_layers": 2, "block_size": 4, "mask_token": 60, "loss": "ce + kl"}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
DRAFTERS = {
    "eagle3": Eagle3Config(steps=4),
    "eagle3-deep": Eagle3Config(steps=3, num_layers=3, norm_output=True, fc_norm=True, train_head=True),
    "mtp": MTPConfig(steps=3, loss="ce + kl"),
    "mtp-own-step": MTPConfig(steps=3, attention="own_step", loss="ce + kl"),
    "mtp-chained": MTPConfig(steps=3, form="chained", hidden="pre_norm", loss="ce + kl"),
    "dflash": DFlashConfig(**BLOCKS, anchors=9),
    "dflash-dpace": DFlashConfig(**BLOCKS, **SLIDING, anchors=1000, weighting="dpace", slots="anchor_predicts"),
    "dspark": DSparkConfig(num_layers=2, block_size=4, mask_token=60, anchors=9, markov_rank=5, markov_head="rnn"),
}
# Lengths of documents, and the share of the pack's rows, from its start, that may be supervised.
PACKS = {
    "many documents": ([1, 2, 3, 9, 1, 14], 1.0),
    "one document, rows left over": ([23], 1.0),
    "a document on the cut, rows left over": ([4, 16, 5], 1.0),
    "the last rank has nothing that counts": ([20, 10], 0.4),
    "nothing counts": ([8, 4], 0.0),
    "fewer rows than ranks": ([2], 1.0),
    "in quarantine": ([9, 4], 1.0),
}
EVEN, CUT = "one document, rows left over", "a document on the cut, rows left over"
EMPTY = ("nothing counts", "in quarantine")
KEPT = torch.arange(0, 61, 2)


@dataclass
class Trained:
    """values: the loss, the sums for the log, and the gradient of each parameter. kept: bytes that autograd held for
    the backward, on the first rank, weights and inputs of what is made again aside."""

    values: dict[str, np.ndarray]
    tokens: int
    kept: int

    def differs(self, other: Trained) -> float:
        """The largest difference, relative where numbers are large."""
        pairs = [(value, other.values[name]) for name, value in self.values.items()]
        return max(float((np.abs(a - b) / np.maximum(np.abs(b), 1)).max()) for a, b in pairs)


def pack_named(name: str) -> tuple[Pack, Features]:
    lengths, share = PACKS[name]
    rng, rows, documents = np.random.default_rng(len(name)), sum(lengths), []
    for n in lengths:
        supervised = rng.random(n) < 0.9
        supervised[max(0, int(share * rows) - sum(map(len, documents))) :] = False
        documents.append(Document(rng.integers(0, TARGET.vocab_size, n).astype(np.int32), supervised))
    generator = torch.Generator().manual_seed(len(name))
    taps = torch.randn(rows, 3, TARGET.hidden_size, generator=generator, dtype=torch.double)
    return Pack(tuple(documents)), Features(taps, torch.randn(rows, TARGET.hidden_size, generator=generator).double())


class Given:
    """A source that has all of it, but for what is in quarantine."""

    def want(self, items):
        pass

    def get(self, index, pack):
        return None if list(PACKS)[index] == "in quarantine" else pack_named(list(PACKS)[index])[1]

    def interrupt(self):
        pass


def frozen_target() -> FrozenTarget:
    torch.manual_seed(1)
    model = LlamaForCausalLM(TARGET).double().requires_grad_(False)
    model.lm_head.weight.normal_(std=0.4)
    return FrozenTarget(model)


def new_drafter(name: str, frozen: FrozenTarget):
    torch.manual_seed(2)
    config = DRAFTERS[name]
    drafter = build_drafter(config, TARGET, KEPT if name == "eagle3-deep" else None).double()
    for module in list(drafter.modules()):  # fp32 norms of the family's would hide what is off behind their rounding
        for child, part in list(module.named_children()):
            if type(part).__name__ == "LlamaRMSNorm":
                setattr(module, child, nn.RMSNorm(TARGET.hidden_size, TARGET.rms_norm_eps).double())
    with torch.no_grad():
        for parameter, p in drafter.named_parameters():
            p.add_(torch.randn_like(p) * (0.2 if "norm" in parameter else 0.15))
    drafter.start_head(frozen)
    return drafter


def step(name: str, frozen: FrozenTarget, batch: Batch, recompute: bool = False) -> Trained:
    drafter = new_drafter(name, frozen)
    drafter.recompute = recompute
    weights = torch.tensor([1 / (2 + k) for k in range(drafter.depth)], dtype=torch.double)
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss, sums = drafter(batch, drafter.targets(batch, frozen), frozen, weights)
    for weight in (*drafter.parameters(), frozen.head_weight, frozen.draft_head(drafter.kept)):
        kept.pop(weight.untyped_storage().data_ptr(), None)
    loss.backward()
    values = {"loss": loss.detach(), "sums": sums, **{parameter: p.grad for parameter, p in drafter.named_parameters()}}
    assert all(v is not None for v in values.values()), "FSDP would wait for this rank's gradient in vain"
    return Trained({key: value.numpy() for key, value in values.items()}, batch.tokens, sum(kept.values()))


def batch_of(index: int, pack: Pack, features: Features | None, **options) -> Batch:
    options = {"dtype": torch.double, "device": "cpu", "address": (0, index), **options}
    if features is None:
        return Batch.weightless(pack, FeatureSpec("t", (0, 1, 2), TARGET.hidden_size, "float64"), **options)
    return Batch.of(pack, features, **options)


def shared_batches(world, lookahead_rows: int) -> tuple[list[Batch], SharedPacks]:
    """Of all packs, this rank's parts, over the wire from the first rank."""
    context = ContextGroup.of(world, ParallelConfig(context=world.size))
    items = [(i, pack_named(name)[0]) for i, name in enumerate(PACKS)]
    fetched = Prefetcher(Given(), items, 2) if context.fetches else None
    spec = FeatureSpec("t", (0, 1, 2), TARGET.hidden_size, "float64")
    packs = SharedPacks(context, fetched, iter(items), spec, lookahead_rows)
    return [batch_of(*packs.next(), part=context.part) for _ in items], packs


def summed(world, mine: Trained) -> Trained:
    values = {key: world.sum(torch.from_numpy(value)).numpy() for key, value in mine.values.items()}
    return Trained(values, int(world.sum(torch.tensor([mine.tokens]))), mine.kept)


def train_every_pack(world, recompute: bool) -> dict[tuple[str, str], Trained]:
    frozen, trained = frozen_target(), {}
    for name in DRAFTERS:
        batches, packs = shared_batches(world, new_drafter(name, frozen).lookahead_rows)
        for pack, batch in zip(PACKS, batches, strict=True):
            assert len(batch.taps) == -(-sum(PACKS[pack][0]) // world.size), "this rank has its own rows, and no others"
            trained[name, pack] = summed(world, step(name, frozen, batch, recompute))
        packs.close()
    return trained if world.rank == 0 else {}


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str], Trained]:
    """What one rank makes of each pack."""
    frozen = frozen_target()
    whole = [batch_of(i, pack_named(name)[0], Given().get(i, None)) for i, name in enumerate(PACKS)]
    return {(name, pack): step(name, frozen, batch) for name in DRAFTERS for pack, batch in zip(PACKS, whole)}


@pytest.fixture(scope="module", params=[(2, False), (3, True)], ids=["two", "three, recomputing"])
def together(request) -> dict[tuple[str, str], Trained]:
    size, recompute = request.param
    return on_ranks(size, train_every_pack, recompute)[0]


@pytest.mark.parametrize("name", DRAFTERS)
def test_ranks_that_share_a_pack_train_what_one_would(alone, together, name):
    for pack, (lengths, _) in PACKS.items():
        shared, whole = together[name, pack], alone[name, pack]
        assert shared.differs(whole) < 1e-10, pack
        assert shared.tokens == whole.tokens == sum(lengths)
        assert bool(whole.values["loss"]) == (pack not in EMPTY) or pack == "fewer rows than ranks"
    assert together[name, EVEN].kept < 0.65 * alone[name, EVEN].kept


@pytest.mark.parametrize("name", DRAFTERS)
def test_recomputed_it_is_the_same_to_the_bit(alone, name):
    frozen, pack = frozen_target(), "many documents"
    again = step(name, frozen, batch_of(0, *pack_named(pack)), recompute=True)
    assert all(np.array_equal(value, again.values[key]) for key, value in alone[name, pack].values.items())
    assert again.kept < 0.5 * alone[name, pack].kept


@dataclass
class Mistake:
    """Made on purpose by `make(patch, start)`, start being the first of this rank's rows; `drafter` is what shows it."""

    drafter: str
    make: Callable[[pytest.MonkeyPatch, int], None]


def _no_gradient(patch, start):
    gather = ContextGroup.gather

    def one_way(self, *rows):
        everyones = [x.detach() for x in gather(self, *rows)]
        return tuple(x.slice_scatter(own, -2, start, start + own.shape[-2]) for x, own in zip(everyones, rows))

    patch.setattr(ContextGroup, "gather", one_way)


def _local_numbers(patch, start):
    original = RolloutAttention.__init__

    def init(self, first, last, *rest, **options):
        original(self, (first - start).clamp(min=0), last - start, *rest, **options)

    patch.setattr(RolloutAttention, "__init__", init)


def _local_positions(patch, start):
    run = DFlash.run_blocks

    def run_blocks(self, bonus, anchors, taps, positions, *rest):
        return run(self, bonus, anchors, taps, positions - start, *rest)

    patch.setattr(DFlash, "run_blocks", run_blocks)


def _local_anchors(patch, start):
    def rounds(self, batch):
        counts = round_counts(batch, self.first, self.depth)
        counts[:, : batch.own.start] = counts[:, batch.own.stop :] = False
        return counts & draw_anchors(counts[0], batch.document_ids, self.config.anchors, batch.generator())

    patch.setattr(DFlash, "rounds", rounds)


def _tokens_of_the_slice(patch, start):
    own = Batch.own_rows.fget
    patch.setattr(Batch, "own_rows", property(lambda self: own(self) - start))


MISTAKES = {
    "what others gather from a rank has no gradient there": Mistake("mtp-own-step", _no_gradient),
    "the mask counts rows of the slice": Mistake("eagle3", _local_numbers),
    "the context's positions are those of the slice": Mistake("dflash", _local_positions),
    "anchors are drawn from the slice": Mistake("dflash", _local_anchors),
    "tokens are those of the slice": Mistake("mtp-chained", _tokens_of_the_slice),
}


def train_mistaken(world, mistakes: list[str]) -> dict[str, Trained]:
    frozen, trained, at = frozen_target(), {}, list(PACKS).index(CUT)
    for name in mistakes:
        drafter = MISTAKES[name].drafter
        batches, packs = shared_batches(world, new_drafter(drafter, frozen).lookahead_rows)
        with pytest.MonkeyPatch.context() as patch:
            MISTAKES[name].make(patch, batches[at].own.start)
            part = ContextGroup.of(world, ParallelConfig(context=world.size)).part
            trained[name] = summed(world, step(drafter, frozen, replace(batches[at], part=part)))
        packs.close()
    return trained


def test_a_mistake_at_the_cut_is_noticed(alone):
    for name, trained in on_ranks(2, train_mistaken, list(MISTAKES))[0].items():
        assert trained.differs(alone[MISTAKES[name].drafter, CUT]) > 1e-3, name


def test_a_row_less_behind_the_own_ones_is_noticed():
    """Where each draft counts, the last own row has its teachers up to lookahead_rows rows on, and no further."""
    frozen, pack = frozen_target(), Pack((Document(np.arange(20, dtype=np.int32), np.ones(20, dtype=bool)),))
    for name in DRAFTERS:
        drafter = new_drafter(name, frozen)
        rows = 10 + drafter.lookahead_rows
        generator = torch.Generator().manual_seed(0)
        taps, final = (torch.randn(*shape, 24, generator=generator).double() for shape in ((10, 3), (rows,)))
        batch = batch_of(0, pack, Features(taps, final), part=Part(0, 2))
        if name.startswith("d"):
            drafter.config.anchors = 1000
        assert drafter.targets(batch, frozen).teacher_rows.max() == rows - 1
        with pytest.raises(IndexError):
            drafter.targets(replace(batch, final=batch.final[:-1]), frozen)


class Random(Given):
    """A source of random packs for the drafters of `runs`."""

    def pack(self, index: int) -> Pack:
        rng = np.random.default_rng(index)
        masks = [rng.random(n) < 0.9 for n in (11, 7 + index % 5)]
        return Pack(tuple(Document(rng.integers(0, 97, len(mask)).astype(np.int32), mask) for mask in masks))

    def get(self, index, pack):
        generator = torch.Generator().manual_seed(index)
        taps = torch.randn(len(pack), TAPS, SIZE, generator=generator)
        return Features(taps, torch.randn(len(pack), SIZE, generator=generator))


def run_loop(world, config: ParallelConfig, name: str, folder: Path, start: int, stop: int) -> tuple[list[dict], dict]:
    """Steps start … stop-1 of four packs each, by the real loop; rows of the log, and weights by name."""
    strategy, frozen = spread(world, name, config)
    if start:
        load_checkpoint(folder / f"step_{start:08d}", strategy)
    context, source = ContextGroup.of(world, config), Random()
    items = ((i, source.pack(i)) for i in range(4 * start + context.data_rank, 4 * stop, context.data_size))
    packs = Prefetcher(source, items, 2) if context.fetches else None
    if context.size > 1:
        spec = FeatureSpec("random", tuple(range(TAPS)), SIZE, "float32")
        packs = SharedPacks(context, packs, items, spec, strategy.drafter.lookahead_rows)
    run = SimpleNamespace(global_batch=4, seed=0, optim=optim(), parallel=config)
    setup, rows = SimpleNamespace(config=run, total_steps=stop, spec=None), []
    checkpointer, tracker = Checkpointer(folder, CheckpointConfig(), {}), SimpleNamespace(log=rows.append)
    trainer = Trainer(setup, world, context, strategy, frozen, checkpointer, tracker, Progress(start, stop), "")
    assert trainer.run(packs, start)
    packs.close()
    checkpointer.close()
    return rows, {key: weight.numpy() for key, weight in strategy.full_weights().items()}


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_the_loop_trains_the_same_with_shared_packs_and_goes_on_without(tmp_path, name):
    """Four ranks by twos against two, in fp32, sharded; then from the checkpoint as two ranks that share nothing."""
    plain = ParallelConfig(compute_dtype="float32")
    sharing = ParallelConfig(compute_dtype="float32", context=2, recompute=name == "dflash")
    expected, weights = on_ranks(2, run_loop, plain, name, tmp_path / "alone", 0, 4)[0]
    begun, _ = on_ranks(4, run_loop, sharing, name, tmp_path / "shared", 0, 2)[0]
    ended, resumed = on_ranks(2, run_loop, plain, name, tmp_path / "shared", 2, 4)[0]
    for row, wanted in zip(begun + ended, expected, strict=True):
        exact = ("step", "packs", "tokens", "supervised_tokens")
        assert [row[key] for key in exact] == [wanted[key] for key in exact]
        for key in ("loss", "grad_norm", "expected_length"):
            assert row[key] == pytest.approx(wanted[key], rel=1e-4), key
    for key, weight in weights.items():
        np.testing.assert_allclose(resumed[key], weight, atol=1e-4, rtol=1e-3, err_msg=key)


def test_what_cannot_share_packs_is_refused():
    with pytest.raises(UserError, match="3 ranks cannot share packs by 2"):
        load_config("ci_eagle3", ["parallel.context=2", "cluster.ranks=3"])
    with pytest.raises(UserError, match=r"over 6 ranks that share packs by 2\n.*multiple of 3"):
        load_config("ci_eagle3", ["parallel.context=2", "cluster.ranks=6"])
    assert load_config("ci_eagle3", ["parallel.context=2", "cluster.ranks=8"]).global_batch == 4
