"""The buffers in which a program's units are gathered: planned without a rank, with the functions that the engine uses."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.buffer import Layout, TensorGroup
from vescale.ir._model_index import ModelIndex
from vescale.ir._operations import Place, Unit
from vescale.ir._program import Program
from vescale.placements import RaggedShard, local_region, shard_dim
from vescale.plans import MeshAxes

__all__ = ["UnitBucket", "unit_buckets"]


@dataclass(frozen=True)
class UnitBucket:
    """Parameters of one unit, dtype and ``requires_grad``: one buffer, one all-gather, one reduce-scatter.

    Sizes are those of one rank. ``resting_bytes`` are always there, ``whole_bytes`` while the unit is gathered, and
    ``gradient_bytes`` while its gradients are not reduced; padding included.
    """

    path: str
    names: tuple[str, ...]
    shard: tuple[str, ...]
    replicate: tuple[str, ...]
    dtype: torch.dtype
    requires_grad: bool
    num_ranks: int
    num_replicas: int
    num_elements: int
    buffer_size: int
    layout: Layout
    backward_ranks: int
    """Among how many ranks parameters are gathered again for backward; 1: they are kept."""
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    is_offloaded: bool = False
    parts: tuple[tuple[int, ...], ...] = ()
    """Where the plan gives the cut, for each parameter the elements of each rank; ``layout`` is of one rank's piece."""

    @property
    def digest(self) -> str:
        """Equal on two ranks exactly when their layouts are."""
        return self.layout.digest

    @property
    def padding_elements(self) -> int:
        return self.buffer_size - self.num_elements

    @property
    def whole_bytes(self) -> int:
        return self.buffer_size * self.compute_dtype.itemsize

    @property
    def resting_bytes(self) -> int:
        """On the device."""
        return 0 if self.is_offloaded else self.buffer_size // self.num_ranks * self.dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        return self.buffer_size * self.reduce_dtype.itemsize if self.requires_grad else 0

    @property
    def collectives(self) -> tuple[tuple[str, str, str, int], ...]:
        """(phase, op, axes joined with ``,``, bytes that a rank exchanges with others) of each in a step."""
        whole, shard = self.whole_bytes, ",".join(self.shard)
        found = [("forward", "all_gather", shard, whole // self.num_ranks * (self.num_ranks - 1))]
        if self.backward_ranks > 1:
            again = whole // self.backward_ranks * (self.backward_ranks - 1)
            found.append(("backward", "all_gather", shard, again))
        if self.requires_grad:
            piece = self.gradient_bytes // self.num_ranks
            found.append(("backward", "reduce_scatter", shard, piece * (self.num_ranks - 1)))
            summed = 2 * piece * (self.num_replicas - 1) // self.num_replicas
            found.append(("backward", "all_reduce", ",".join(self.replicate), summed))
        return tuple(one for one in found if one[3])


def unit_buckets(program: Program, model: nn.Module) -> tuple[UnitBucket, ...]:
    """Every buffer of every unit, in the program's order. Reads names, shapes and dtypes; nothing is communicated."""
    index = ModelIndex(model)
    resting = _resting(program, index)
    units = [(i.path, i.op) for i in program if isinstance(i.op, Unit)]
    return tuple(bucket for path, unit in units for bucket in _buckets(path, unit, index, program.axes, resting))


def _buckets(
    path: str, unit: Unit, index: ModelIndex, axes: MeshAxes, resting: dict[str, tuple[Placement, ...]]
) -> Iterator[UnitBucket]:
    positions = [axes.index(axis) for axis in unit.shard]
    ranks = math.prod(map(axes.size, unit.shard))
    kinds: dict[tuple[torch.dtype, bool, bool], list[str]] = {}
    for name in unit.names:
        first = index.state_names[f"{path}.{name}" if path else name]
        owner, attribute = index.owner(first)
        tensor = getattr(index.modules[owner], attribute)
        rest = resting[first][positions[0]]
        is_planned = isinstance(rest, RaggedShard) and rest.local_units is None
        kinds.setdefault((tensor.dtype, tensor.requires_grad, is_planned), []).append(first)
    keep = unit.reshard_after_forward if unit.reshard_after_forward is not None else bool(path)
    backward = (ranks if keep else 1) if isinstance(keep, bool) else keep
    policy = unit.mp_policy
    for (dtype, requires_grad, _), names in kinds.items():
        narrow = policy.param_dtype if policy is not None and dtype.is_floating_point else None
        compute = narrow or dtype
        reduced = (policy.reduce_dtype if policy is not None else None) or compute
        dtypes = frozenset((dtype, compute, reduced))
        places = []
        for name in names:
            at_rest = resting[name]
            run = [Replicate() if axis in positions else placement for axis, placement in enumerate(at_rest)]
            places.append(_place(index.states[name].shape or (), at_rest[positions[0]], run, axes.sizes, ranks))
        parts = [max(part) if part is not None else None for _, part, _ in places]
        if parts[0] is None:  # the planner's choice
            layout = _layout(
                tuple(numel for numel, _, _ in places), tuple(block for _, _, block in places), ranks, dtypes
            )
            size = layout.buffer_size
        else:
            layout = _layout(tuple(part or 0 for part in parts), (1,) * len(parts), 1, dtypes)
            size = layout.buffer_size * ranks
        held = sum(numel for numel, _, _ in places)
        yield UnitBucket(
            path,
            tuple(names),
            unit.shard,
            unit.replicate,
            dtype,
            requires_grad,
            ranks,
            math.prod(axes.size(axis) for axis in unit.replicate),
            held,
            size,
            layout,
            backward,
            compute,
            reduced,
            unit.offload_pinned is not None,
            tuple(part for _, part, _ in places if part is not None),
        )


def _resting(program: Program, index: ModelIndex) -> dict[str, tuple[Placement, ...]]:
    found: dict[str, tuple[Placement, ...]] = {}
    for i in program:
        if isinstance(i.op, Place):
            name = index.state_names[f"{i.path}.{i.target}" if i.path else i.target]
            found[name] = tuple(Replicate() if p is None else p for p in i.op.placements)
    return found


def _place(
    shape: tuple[int, ...], rest: Placement, run: list[Placement], sizes: tuple[int, ...], ranks: int
) -> tuple[int, tuple[int, ...] | None, int]:
    """(elements, those of each rank's part where the cut is given, elements that stay together)."""
    local = local_region(shape, run, sizes, (0,) * len(sizes)).local_shape
    inner = [dim for p in run if (dim := shard_dim(p)) is not None and dim > 0]
    if type(rest) is Shard:
        size, others = local[rest.dim], math.prod(n for dim, n in enumerate(local) if dim != rest.dim)
        chunk = -(-size // ranks)
        return math.prod(local), tuple(max(0, min(chunk, size - r * chunk)) * others for r in range(ranks)), 1
    assert isinstance(rest, RaggedShard)
    if rest.local_units is None:
        return math.prod(local), None, rest.granule(local, inner)
    runs = (rest.run(local, local, ranks, rank, inner) for rank in range(ranks))
    return math.prod(local), tuple(end - begin for begin, end in runs), 1


@functools.lru_cache(maxsize=1024)  # layers repeat
def _layout(numels: tuple[int, ...], blocks: tuple[int, ...], ranks: int, dtypes: frozenset[torch.dtype]) -> Layout:
    names = [str(number) for number in range(len(numels))]
    return TensorGroup.plan(
        {name: (numel,) for name, numel in zip(names, numels)},
        ranks,
        dtypes=set(dtypes),
        blocks=dict(zip(names, blocks)),
    ).layout
