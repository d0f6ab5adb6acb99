"""Attention over a sharded sequence in a forward on the meta device: the communication of each method."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.ir._model_index import Running
from vescale.ir._operations import Attention
from vescale.ir._placement_flow import AxisPlacement
from vescale.ir._program import Program
from vescale.ops import RingSchedule, Runs
from vescale.placements import local_region, shard_dim
from vescale.plans import AttentionMethod, MeshAxes

# (forward or backward, op or None where unknown, axes, bytes or None where unknown)
Found = tuple[str, str | None, str, int | None]

_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_SIGNATURE = inspect.Signature(
    [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in _PARAMETERS]
)


@dataclass(frozen=True)
class _Operand:
    """A query, key or value: its global shape, and its placement on each axis."""

    shape: tuple[int, ...]
    placements: tuple[AxisPlacement, ...]
    element_bytes: int
    has_gradient: bool

    def cuts(self, axis: int, dim: int) -> bool:
        """Whether an axis cuts the dim, counted from the back."""
        placement = self.placements[axis]
        return placement is not None and shard_dim(placement) == len(self.shape) + dim

    def bytes_along(self, axis: int, axes: MeshAxes) -> int | None:
        """Bytes of the part that the ranks of an axis hold together."""
        total = math.prod(self.shape) * self.element_bytes
        for other, name in enumerate(axes):
            placement = self.placements[other]
            if other == axis or axes.size(name) == 1:
                continue
            if placement is None:
                return None
            total //= axes.size(name) if shard_dim(placement) is not None else 1
        return total

    def on(self, axis: int, placement: AxisPlacement) -> _Operand:
        return replace(self, placements=(*self.placements[:axis], placement, *self.placements[axis + 1 :]))


@dataclass(frozen=True)
class _Call:
    path: str
    methods: tuple[AttentionMethod | None, ...]
    query: _Operand
    key: _Operand
    value: _Operand
    is_causal: bool

    def collectives(self, axes: MeshAxes) -> Iterator[Found]:
        """As the runtime goes about it: heads are exchanged first, then keys and values gathered, then a ring is run."""
        sizes = [axes.size(name) for name in axes]
        unknown = [
            a
            for a, placement in enumerate(self.query.placements)
            if placement is None and self.methods[a] and sizes[a] > 1
        ]
        rows = [a for a, size in enumerate(sizes) if size > 1 and self.query.cuts(a, -2)]
        for axis in unknown:
            yield from self._unknown(axes.names[axis])
        query, key, value = self.query, self.key, self.value
        for axis in (a for a in rows if self.methods[a] == "ulysses"):
            back = replace(query, shape=(*query.shape[:-1], value.shape[-1]))
            exchanged = [_exchanged(x, axis, axes) for x in (query, key, value)]
            for before, after in zip((query, key, value, back), (*exchanged, exchanged[0])):
                yield from _moved(before, axis, axes, gathers=isinstance(after.placements[axis], Replicate))
            query, key, value = exchanged
        gathered = [a for a in rows if self.methods[a] == "all_gather" and (key.cuts(a, -2) or value.cuts(a, -2))]
        if len(gathered) > 1:  # in one collective or several, as it gets cheaper
            yield from self._unknown(",".join(axes.names[a] for a in gathered))
        elif gathered:
            yield from _gathered(key, value, gathered[0], axes)
        for axis in gathered:
            key, value = key.on(axis, Replicate()), value.on(axis, Replicate())
        ring_axes = [a for a in rows if self.methods[a] == "ring" and key.cuts(a, -2)]
        if ring_axes:
            yield from self._ring(query, key, value, ring_axes, axes)

    def _unknown(self, axis: str) -> Iterator[Found]:
        yield "forward", None, axis, None
        if self.query.has_gradient or self.key.has_gradient or self.value.has_gradient:
            yield "backward", None, axis, None

    def _ring(
        self, query: _Operand, key: _Operand, value: _Operand, ring_axes: Sequence[int], axes: MeshAxes
    ) -> Iterator[Found]:
        """Each step of the rank that receives most."""
        together = ",".join(axes.names[a] for a in ring_axes)
        num_elements = _elements_a_key(query, key, value, ring_axes, axes)
        if num_elements is None or any(key.placements[a] != value.placements[a] for a in ring_axes):
            yield from self._unknown(together)
            return
        forward, backward = max(_received(s, r) for s, r in _rings(query, key, ring_axes, axes, self.is_causal))
        a_key = num_elements * key.element_bytes
        for num_keys in forward:
            yield "forward", "all_to_all", together, num_keys * a_key
        if query.has_gradient or key.has_gradient or value.has_gradient:
            for num_keys in forward:
                yield "backward", "all_to_all", together, num_keys * a_key
            for num_keys in backward:  # added up in float32 at least
                yield "backward", "all_to_all", together, num_keys * num_elements * max(key.element_bytes, 4)


def _received(schedule: RingSchedule, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Keys that a rank receives in each step: with their blocks, and with their gradients."""

    def of(moves: Sequence[tuple[int, int, int]]) -> int:
        return sum(schedule.length(owner) for _, to, owner in moves if to == rank)

    steps = range(schedule.num_steps)
    forward = [moves for step in steps[1:] if (moves := list(schedule.forward_moves(step)))]
    backward = [moves for step in steps if (moves := list(schedule.gradient_moves(step)))]
    return tuple(map(of, forward)), tuple(map(of, backward))


def _rings(
    query: _Operand, key: _Operand, ring_axes: Sequence[int], axes: MeshAxes, is_causal: bool
) -> Iterator[tuple[RingSchedule, int]]:
    """Every ring of the mesh, with each of its ranks."""
    sizes = tuple(axes.size(name) for name in axes)

    def runs(x: _Operand, coordinate: tuple[int, ...]) -> Runs:
        dim = len(x.shape) - 2
        rows = tuple(
            placement if placement is not None and shard_dim(placement) == dim else Replicate()
            for placement in x.placements
        )
        found = local_region(x.shape, rows, sizes, coordinate).intervals[dim]
        return tuple((run[0], run[-1]) for run in found if run[0] < run[-1])

    for others in itertools.product(*((0,) if a in ring_axes else range(size) for a, size in enumerate(sizes))):
        members = [
            tuple(dict(zip(ring_axes, at)).get(a, other) for a, other in enumerate(others))
            for at in itertools.product(*(range(sizes[a]) for a in ring_axes))
        ]
        rows, keys = (tuple(runs(x, at) for at in members) for x in (query, key))
        schedule = RingSchedule(rows, keys, is_causal)
        yield from ((schedule, rank) for rank in range(len(members)))


def _elements_a_key(
    query: _Operand, key: _Operand, value: _Operand, ring_axes: Sequence[int], axes: MeshAxes
) -> int | None:
    """Elements of keys and values together that a rank holds for each position; None where it is not known."""
    total = 0
    for x in (key, value):
        elements = math.prod(x.shape[:-2]) * x.shape[-1]
        for axis, name in enumerate(axes):
            placement, of_query, size = x.placements[axis], query.placements[axis], axes.size(name)
            if axis in ring_axes or size == 1:
                continue
            dim = shard_dim(of_query) if of_query is not None else None
            if placement is None or of_query is None or (shard_dim(placement) is not None and placement != of_query):
                return None
            if shard_dim(placement) is not None:
                elements //= size
            elif dim is not None and dim < len(query.shape) - 2 and x.shape[dim] > 1:
                shared, own = query.shape[dim] // x.shape[dim], query.shape[dim] // size
                if shared % own and own % shared:
                    return None
                elements = elements // x.shape[dim] * max(own // shared, 1)
        total += elements
    return total


def _exchanged(x: _Operand, axis: int, axes: MeshAxes) -> _Operand:
    """Over heads instead of the sequence; whole where the ranks do not divide the heads."""
    heads = len(x.shape) - 3
    num_ranks = axes.size(axes.names[axis])
    for other, name in enumerate(axes):
        num_ranks *= axes.size(name) if other != axis and x.cuts(other, -3) else 1
    placement: Placement = Replicate() if x.shape[heads] % num_ranks else Shard(heads)
    return x.on(axis, placement)


def _moved(x: _Operand, axis: int, axes: MeshAxes, *, gathers: bool) -> Iterator[Found]:
    """Heads that later axes cut are exchanged in a group over these, too; nothing moves along them."""
    size = axes.size(axes.names[axis])
    later = [other for other in range(axis + 1, len(axes.names)) if x.cuts(other, -3) and not gathers]
    name = ",".join(axes.names[a] for a in (axis, *later))
    total = x.bytes_along(axis, axes) if x.cuts(axis, -2) else None
    moved = None if total is None else total * (size - 1) // size // (1 if gathers else size)
    yield "forward", "all_gather" if gathers else "all_to_all", name, moved
    if x.has_gradient:
        yield "backward", "reduce_scatter" if gathers else "all_to_all", name, moved


def _gathered(key: _Operand, value: _Operand, axis: int, axes: MeshAxes) -> Iterator[Found]:
    """In one collective if they have the same placements."""
    if (
        key.placements == value.placements
        and key.shape[:-1] == value.shape[:-1]
        and key.element_bytes == value.element_bytes
    ):
        packed = replace(key, shape=(*key.shape[:-1], key.shape[-1] + value.shape[-1]))
        yield from _moved(
            replace(packed, has_gradient=key.has_gradient or value.has_gradient), axis, axes, gathers=True
        )
        return
    for x in (key, value):
        if x.cuts(axis, -2):
            yield from _moved(x, axis, axes, gathers=True)


class AttentionCalls:
    """The calls seen so far."""

    def __init__(self, program: Program) -> None:
        self._methods = {i.path: i.op.methods for i in program if isinstance(i.op, Attention)}
        nothing: tuple[AttentionMethod | None, ...] = (None,) * len(program.axes.names)
        self._running = Running(("", nothing))
        self._calls: list[_Call] = []

    def watched(self, module: nn.Module, path: str) -> contextlib.AbstractContextManager[None]:
        """While open, calls inside the module are made by the method that its entry says."""
        own = self._methods.get(path)
        if own is None:
            return contextlib.nullcontext()
        return self._running.watched(
            module, lambda outer: (path, tuple(a if a is not None else b for a, b in zip(own, outer[1])))
        )

    def called(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        placements_of: Callable[[torch.Tensor], tuple[AxisPlacement, ...]],
    ) -> None:
        """``placements_of(tensor)``: its placement on each axis."""
        given = _SIGNATURE.bind(*args, **kwargs).arguments
        path, methods = self._running.innermost
        query, key, value = (
            _Operand(tuple(x.shape), placements_of(x), x.element_size(), x.requires_grad)
            for x in (given["query"], given["key"], given["value"])
        )
        self._calls.append(_Call(path, methods, query, key, value, bool(given.get("is_causal"))))

    def collectives(self, axes: MeshAxes) -> Iterator[tuple[str, Found]]:
        """Each with the module whose plan entry gives the method."""
        for call in self._calls:
            yield from ((call.path, found) for found in call.collectives(axes))
