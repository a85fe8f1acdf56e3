"""Context parallelism: consecutive ranks share one pack, each with a slice of its rows.

Every rank of a group has the pack's ids and masks whole, the features of its own rows, and trains the drafts (of block
drafters: the anchors) of its own rows. What rows need of each other are the keys and values of attention: those are
gathered over the group (Llama 3, arXiv 2407.21783, §3.3.2), and their gradients come back the same way.

Letters: C ranks of a group, R rows of a rank, d a head's width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from data_pipelines.features import Features, FeatureSpec
from data_pipelines.packing import Pack
from data_pipelines.stream.consumer import GaveUp, Prefetcher

from ..batch import Part
from ..losses import upcast
from .config import ParallelConfig
from .world import World

_NOTHING, _FEATURES, _QUARANTINED = range(3)  # what a pack's first rank has for the others


@dataclass(frozen=True)
class ContextGroup:
    """This rank among those that share a pack. data_rank of data_size: which group it is, of how many."""

    rank: int
    size: int
    data_rank: int
    data_size: int
    device: torch.device
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, world: World, config: ParallelConfig) -> ContextGroup:
        """All ranks call it. config.context has to divide their number."""
        size, group = config.context, None
        if size > 1:
            group, _ = dist.new_subgroups(size)
        data_rank, rank = divmod(world.rank, size)
        return cls(rank, size, data_rank, world.size // size, world.device, group)

    @property
    def fetches(self) -> bool:
        """Whether it is this rank that gets the group's packs."""
        return self.rank == 0

    @property
    def part(self) -> Part:
        return Part() if self.size == 1 else Part(self.rank, self.size, self.gather)

    def gather(self, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Tensors [..., R, d], of as many rows on every rank → [..., C · R, d], in one collective. Differentiable."""
        return _Gather.apply(self.group, *rows)


class _Gather(torch.autograd.Function):
    """An all-gather of rows; its backward a reduce-scatter in fp32, whatever is trained. (torch's own differentiable
    all-gathers reduce in the dtype of the gradients, and gather one tensor at a time.)"""

    @staticmethod
    def forward(ctx, group, *rows):
        ctx.group, ctx.dtypes, shapes = group, [x.dtype for x in rows], [x.shape for x in rows]
        own = torch.cat([x.flatten() for x in rows])
        everyones = own.new_empty(dist.get_world_size(group), len(own))
        dist.all_gather(list(everyones), own, group=group)
        parts = everyones.split([shape.numel() for shape in shapes], 1)
        return tuple(p.view(-1, *shape).movedim(0, -3).flatten(-3, -2) for p, shape in zip(parts, shapes))

    @staticmethod
    def backward(ctx, *grads):
        size = dist.get_world_size(ctx.group)
        parts = [upcast(grad).unflatten(-2, (size, -1)).movedim(-3, 0) for grad in grads]
        everyones = torch.cat([part.flatten(1) for part in parts], 1)
        own = torch.empty_like(everyones[0])
        dist.reduce_scatter(own, list(everyones), group=ctx.group)
        mine = own.split([part[0].numel() for part in parts])
        return None, *(x.view_as(part[0]).to(dtype) for x, part, dtype in zip(mine, parts, ctx.dtypes))


class SharedPacks:
    """`Prefetcher.next` for all ranks of a group: the first has the prefetcher, and sends the others their slices.

    packs: on the first rank; the others go by `items`, the (index, pack) that it was given. spec: of the features.
    lookahead_rows: how many rows past a rank's own it has `final` of. wait_seconds is what this rank waited for data, or
    for the first rank to have them.

    An error of the first rank ends it; the others then find it gone, as any rank does in a collective.
    """

    def __init__(
        self,
        context: ContextGroup,
        packs: Prefetcher | None,
        items: Iterator[tuple[int, Pack]],
        spec: FeatureSpec,
        lookahead_rows: int,
    ):
        self._context, self._packs, self._items, self._lookahead_rows = context, packs, items, lookahead_rows
        self._taps, self._width, self._dtype = len(spec.taps), spec.hidden_size, getattr(torch, spec.dtype)
        self._waited = 0.0

    @property
    def wait_seconds(self) -> float:
        return self._waited if self._packs is None else self._packs.wait_seconds

    def close(self) -> None:
        if self._packs is not None:
            self._packs.close()

    def next(self, give_up: Callable[[], bool] = lambda: False) -> tuple[int, Pack, Features | None]:
        """Features of this rank's rows, on its device. Raises GaveUp on all ranks of the group, when it was the
        first that gave up."""
        return self._receive() if self._packs is None else self._send(give_up)

    def _send(self, give_up: Callable[[], bool]) -> tuple[int, Pack, Features | None]:
        try:
            index, pack, features = self._packs.next(give_up)
        except GaveUp:
            self._announce(_NOTHING)
            raise
        self._announce(_QUARANTINED if features is None else _FEATURES, index)
        if features is None:
            return index, pack, None
        for member in range(1, self._context.size):
            for tensor in vars(self._cut(features, member)).values():
                if tensor.numel():
                    dist.send(_bytes(tensor.to(self._context.device)), group=self._context.group, group_dst=member)
        own = vars(self._cut(features, 0)).items()  # copied, or it would keep the whole pack in memory
        return index, pack, Features(**{name: x.to(self._context.device, copy=True) for name, x in own})

    def _receive(self) -> tuple[int, Pack, Features | None]:
        began = time.monotonic()
        state, index = self._announce()
        self._waited += time.monotonic() - began
        if state == _NOTHING:
            raise GaveUp
        planned, pack = next(self._items)
        if index != planned:
            raise RuntimeError(
                f"the first rank of this group has pack {index}, but by this rank's plan it is {planned}"
            )
        if state == _QUARANTINED:
            return index, pack, None
        own, final = self._rows(len(pack), self._context.rank)
        made = Features(
            torch.empty(own, self._taps, self._width, dtype=self._dtype, device=self._context.device),
            torch.empty(final, self._width, dtype=self._dtype, device=self._context.device),
        )
        for tensor in vars(made).values():
            if tensor.numel():
                dist.recv(_bytes(tensor), group=self._context.group, group_src=0)
        return index, pack, made

    def _announce(self, state: int = 0, index: int = -1) -> tuple[int, int]:
        """What the first rank has: known to all."""
        told = torch.tensor([state, index])
        dist.broadcast(told, group=self._context.group, group_src=0)
        return tuple(told.tolist())

    def _rows(self, tokens: int, member: int) -> tuple[int, int]:
        """How many rows of taps and of final a member has."""
        own = Part(member, self._context.size).rows(tokens)
        size = own.stop - own.start
        return size, min(size + self._lookahead_rows, self._context.size * size - own.start)

    def _cut(self, features: Features, member: int) -> Features:
        tokens = len(features.taps)
        start, (taps, final) = Part(member, self._context.size).rows(tokens).start, self._rows(tokens, member)
        return Features(_slice(features.taps, start, taps), _slice(features.final, start, final))


def _slice(x: torch.Tensor, start: int, rows: int) -> torch.Tensor:
    """x[start : start + rows], with zeros for rows that it does not have."""
    there = x[start : start + rows]
    return there if len(there) == rows else torch.cat([there, x.new_zeros(rows - len(there), *x.shape[1:])])


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Backends send bytes of every dtype, but not every dtype."""
    return x.view(torch.uint8)
