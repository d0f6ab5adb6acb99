"""How the work of an attention on DTensors is split, and how each operand is used then; see :mod:`vescale.ops.attention`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import DTensorSpec, local_of, no_torch_function, spec_of
from vescale.errors import UnsupportedOpError
from vescale.ops._context_parallel import sequence_axes
from vescale.ops._conversion import convert, enter_local
from vescale.ops._observer import report_implicit_move, running_module
from vescale.placements import InterleavedShard, local_region, shard_dim, split_factor

__all__ = ["ATTENTION", "ROWS", "AttentionWork", "OperandUse"]

ATTENTION = "scaled_dot_product_attention"
ROWS = -2  # the dim, counted from the back, of the query's positions


@dataclass(frozen=True)
class OperandUse:
    """An operand's placements while the kernel runs, those of its local gradient, and the dims that are cut to this rank's
    part of the work."""

    placements: tuple[Placement, ...]
    grads: tuple[Placement, ...]
    cuts: tuple[int, ...]


@dataclass(frozen=True)
class AttentionWork:
    """How the work is split.

    Attributes:
        shape: of the query.
        splits: for each mesh axis the dim, counted from the back, over which it splits the work (a leading dim, or the rows
            of the query), or None.
        placements: of the query and of the result.
        mesh: of the operands.
        ring_axes: axes along which blocks of keys and values are passed round.
    """

    shape: tuple[int, ...]
    splits: tuple[int | None, ...]
    placements: tuple[Placement, ...]
    mesh: DeviceMesh
    ring_axes: tuple[int, ...] = ()
    # By id of an operand's spec, which the value keeps alive, and the operand's name.
    _uses: dict[tuple[int, str], tuple[DTensorSpec, OperandUse]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def of(
        cls, query: DTensor | DTensorSpec, *others: DTensor | DTensorSpec | None, ring_axes: Sequence[int] = ()
    ) -> AttentionWork:
        """Along each axis the query determines the split if it is sharded there, else the first operand that is."""
        specs = tuple(spec_of(x) if isinstance(x, DTensor) else x for x in (query, *others))
        key = len(specs), *map(id, specs), *ring_axes
        found = _WORKS.get(key)
        if found is None:
            if len(_WORKS) >= _MAX_WORKS:
                _WORKS.clear()
            found = _WORKS[key] = specs, cls._of(*specs, ring_axes=ring_axes)  # type: ignore[arg-type]
        return found[1]

    @classmethod
    def _of(cls, query: DTensorSpec, *others: DTensorSpec | None, ring_axes: Sequence[int]) -> AttentionWork:
        splits: list[int | None] = []
        placements: list[Placement] = []
        rows = sequence_axes(query)
        for axis, own in enumerate(query.placements):
            split = next((d for x in (query, *others) if (d := _leading_shard(x, axis, query)) is not None), None)
            if axis in rows:
                split = ROWS
            splits.append(split)
            if split is None:
                placements.append(Replicate())
            else:
                sharded_so = shard_dim(own) == query.ndim + split
                placements.append(own if sharded_so else Shard(query.ndim + split))
        return cls(tuple(query.shape), tuple(splits), tuple(placements), query.device_mesh, tuple(ring_axes))

    def use(self, x: DTensor | DTensorSpec, name: str) -> OperandUse:
        """How an operand is used."""
        spec = spec_of(x) if isinstance(x, DTensor) else x
        found = self._uses.get((id(spec), name))
        if found is None:
            if len(self._uses) >= _MAX_WORKS:
                self._uses.clear()
            found = self._uses[id(spec), name] = spec, self._use(spec, name)
        return found[1]

    def _use(self, x: DTensorSpec, name: str) -> OperandUse:
        kept = self._kept(x, name)
        wanted = tuple(own if axis in kept else Replicate() for axis, own in enumerate(x.placements))
        grads = tuple(
            own if axis in kept or split is None else Partial()  # used whole, or sliced: the gradients add up
            for axis, (split, own) in enumerate(zip(self.splits, wanted))
        )
        cuts = []
        for split in {
            s for s in self.splits if s is not None and (_size(x, s) > 1 or self.shape[s] == 1 <= _size(x, s))
        }:
            if split == ROWS and name in ("key", "value"):
                continue  # any row may attend to any key
            axes = [axis for axis, other in enumerate(self.splits) if other == split]
            if x.shape[split] == self.shape[split] and all(wanted[axis] == self.placements[axis] for axis in axes):
                continue
            cuts.append(split)
        return OperandUse(wanted, grads, tuple(cuts))

    def operand(self, x: DTensor, name: str) -> torch.Tensor:
        """The local part of an operand, which is redistributed first where the split cannot use its placement."""
        use = self.use(x, name)
        if tuple(x.placements) != (wanted := use.placements):
            report_implicit_move(ATTENTION, name, local_of(x), x.placements, wanted, self._edit(x, wanted))
            # On the other axes, Partial gradients stay Partial.
            moved = [None if own == target else target for own, target in zip(x.placements, wanted)]
            x = convert(x, moved, requester=f"implicit: {ATTENTION}")
        local = enter_local(x, use.grads)
        for split in use.cuts:
            with no_torch_function():
                local = self._cut(local, x, split)
        return local

    def _kept(self, x: DTensorSpec, name: str) -> set[int]:
        """Axes along which an operand stays sharded, because each rank has all that its queries attend to."""
        kept = {axis for axis in range(self.mesh.ndim) if self.mesh.size(axis) == 1}
        kept |= set(self.ring_axes) if name in ("key", "value") else set()
        for split in {split for split in self.splits if split is not None}:
            axes = [axis for axis, other in enumerate(self.splits) if other == split]
            own = {axis: x.placements[axis] for axis in axes if shard_dim(x.placements[axis]) == x.ndim + split}
            if not own or (split == ROWS and name in ("key", "value")):
                continue
            if _covers(
                x.shape[split],
                self.shape[split],
                tuple(_alone(own.get(axis, Replicate())) for axis in axes),
                tuple(_alone(self.placements[axis]) for axis in axes),
                tuple(self.mesh.size(axis) for axis in axes),
            ):
                kept |= set(own)
        return kept

    def _cut(self, local: torch.Tensor, x: DTensor, split: int) -> torch.Tensor:
        """The part along a split dim that this rank's queries use: runs of indices, or one key/value head for each query
        head if the heads of a rank are shared unevenly."""
        runs = self.held(self.shape, self.placements, split)
        found = self.held(tuple(x.shape), tuple(x.placements), split)
        if len(found) > 1:
            raise UnsupportedOpError(
                f"{ATTENTION}: dim {x.ndim + split} of an operand of shape {tuple(x.shape)} is cut into several runs by "
                f"{x.placements}, and the query's by {self.placements}; place query, key, value and mask alike"
            )
        first_held = found[0][0] if found else 0
        if len(runs) > 1:
            return torch.cat([self._cut_run(local, x, split, run, first_held) for run in runs], split)
        return self._cut_run(local, x, split, runs[0] if runs else (0, 0), first_held)

    def _cut_run(
        self, local: torch.Tensor, x: DTensor, split: int, run: tuple[int, int], first_held: int
    ) -> torch.Tensor:
        start, stop = run
        group = self.shape[split] // x.shape[split]  # query heads that share a key/value head
        first, last = start // group, max(stop - 1, start) // group + 1
        if last - first > 1 and (start % group or stop % group):
            heads = [head // group - first_held for head in range(start, stop)]
            return local.index_select(split, torch.tensor(heads, device=local.device))
        length = last - first if stop > start else 0
        return local if length == local.shape[split] else local.narrow(split, first - first_held, length)

    def held(self, shape: tuple[int, ...], placements: tuple[Placement, ...], split: int) -> list[tuple[int, int]]:
        """The global indices along a dim that this rank holds, as intervals [start, stop)."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None  # ranks outside the mesh run no forward
        region = local_region(shape, placements, tuple(self.mesh.shape), coordinate)
        return [(run[0], run[-1]) for run in region.intervals[len(shape) + split] if run[0] < run[-1]]

    def _edit(self, x: DTensor, wanted: Sequence[Placement]) -> str | None:
        """The plan entry for keys and values that are gathered because the sequence is sharded."""
        axes = [
            self.mesh.mesh_dim_names[axis]
            for axis, (own, target) in enumerate(zip(x.placements, wanted))
            if self.splits[axis] == ROWS and own != target and self.mesh.mesh_dim_names
        ]
        if not axes:
            return None
        methods = ", ".join(f"{axis}: all_gather" for axis in axes)
        return f"write `'{running_module()}': {{{methods}}}` in the plan's attention section"


# By ids of the operands' specs, which the values keep alive (equal specs are mostly one object), and the axes of the ring.
_WORKS: dict[tuple[int, ...], tuple[tuple[DTensorSpec | None, ...], AttentionWork]] = {}
_MAX_WORKS = 256


def _alone(placement: Placement) -> Placement:
    """The same placement for a tensor that has only the sharded dim."""
    if shard_dim(placement) is None:
        return placement
    pieces = split_factor(placement)
    return Shard(0) if pieces == 1 else InterleavedShard(0, pieces)


@functools.lru_cache(maxsize=1024)
def _covers(
    size: int,
    query_size: int,
    placements: tuple[Placement, ...],
    query_placements: tuple[Placement, ...],
    mesh_shape: tuple[int, ...],
) -> bool:
    """Whether each rank's part of a dim covers its part of the query's dim. Each of the ``size`` indices of the operand is
    shared by ``query_size / size`` consecutive indices of the query."""
    if size == query_size and placements == query_placements:
        return True
    if query_size % size:
        return False
    group = query_size // size
    for coordinate in itertools.product(*map(range, mesh_shape)):
        (held,), (met,) = (
            local_region((n,), along, mesh_shape, coordinate).intervals
            for n, along in ((size, placements), (query_size, query_placements))
        )
        for start, stop in met:
            if start < stop and not any(a <= start // group and (stop - 1) // group < b for a, b in held):
                return False
    return True


def _leading_shard(x: DTensor | DTensorSpec | None, axis: int, query: DTensor | DTensorSpec) -> int | None:
    """The leading dim, counted from the back, that an operand is sharded on along a mesh axis. One of size 1 is broadcast,
    except where the query's has this size, too."""
    if x is None:
        return None
    dim = shard_dim(x.placements[axis])
    if dim is None or dim - x.ndim >= -2:
        return None
    is_broadcast = x.shape[dim] == 1 and (dim - x.ndim < -query.ndim or query.shape[dim - x.ndim] > 1)
    return None if is_broadcast else dim - x.ndim


def _size(x: DTensor | DTensorSpec, split: int) -> int:
    return x.shape[split] if -split <= x.ndim else 1
