"""Views that keep the row-major order of the elements."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import DTensorSpec, StridedShard, local_of, spec_of
from vescale.compat.random_ops import correct_inplace_view
from vescale.ops._call import Decision, OpCall, Placements, names, with_placements
from vescale.ops._conversion import bring
from vescale.ops._registry import handles, register_aten
from vescale.placements import (
    FlattenedShard,
    InterleavedShard,
    Interval,
    RaggedShard,
    Region,
    coordinates,
    is_sharded,
    local_region,
    normalize_placements,
    own_region,
    ragged_axis,
    shard_dim,
    shift_dim,
    split_factor,
    without_partials,
)

# Placements of views that flatten and split dims which the ranks do not divide.
#
# PyTorch describes the shards of a flattened dim with ``Shard`` and ``_StridedShard``, which it can where shards are equal,
# and gathers or refuses otherwise. :class:`FlattenedShard` describes all others.


def is_cut_unevenly(spec: DTensorSpec) -> bool:
    """Whether an axis shards a dim, or what earlier axes leave of it, that its ranks do not divide."""
    return any(
        isinstance(p, FlattenedShard)
        or (shard_dim(p) is not None and _left(spec, axis) % (split_factor(p) * spec.mesh.size(axis)) != 0)
        for axis, p in enumerate(spec.placements)
    )


def _left(spec: DTensorSpec, axis: int) -> int:
    """The size of the dim that a mesh axis cuts, as the earlier axes leave it, where all cut it as ``Shard`` and evenly; of
    the whole dim otherwise."""
    placement = spec.placements[axis]
    dim = shard_dim(placement)
    if dim is None:
        return 0
    size = int(spec.shape[dim])
    if type(placement) is not Shard:
        return size
    cuts = [a for a, p in enumerate(spec.placements[:axis]) if shard_dim(p) == dim]
    parts = math.prod(spec.mesh.size(a) for a in cuts)
    return size // parts if all(type(spec.placements[a]) is Shard for a in cuts) and size % parts == 0 else size


def regrouped(spec: DTensorSpec, shape: Sequence[int]) -> Placements | None:
    """The placements with which each rank holds the same elements of a row-major view of ``shape``; None if there are none.

    Each cut divides the middle one of three factors of the tensor's flattening, ``(outer, size, inner)``; they are looked
    for in one dim of the view.
    """
    if tuple(shape) == tuple(spec.shape):
        return tuple(spec.placements)
    for together in (False, True):
        placements = tuple(
            _in_shape(p, tuple(spec.shape), tuple(shape), spec.mesh.size(axis), together, _left(spec, axis))
            if is_sharded(p)
            else p
            for axis, p in enumerate(spec.placements)
        )
        found = tuple(p for p in placements if p is not None)
        if len(found) < len(placements):
            return None
        if not _share_a_dim(spec, found):
            return found
        for one in dict.fromkeys((_nested(found, spec.mesh.shape), found)):
            if _hold_the_same(spec, shape, one):
                return one
    return None


def _nested(placements: Placements, mesh_shape: Sequence[int]) -> Placements:
    """With ``Shard`` for what cuts each of the parts that earlier axes have cut the same dim into."""
    found: list[Placement] = []
    for placement in placements:
        if isinstance(placement, InterleavedShard):
            earlier = [size for p, size in zip(found, mesh_shape) if shard_dim(p) == placement.dim]
            if placement.num_chunks == math.prod(earlier):
                placement = Shard(placement.dim)
        found.append(placement)
    return tuple(found)


def _in_shape(
    placement: Placement, shape: tuple[int, ...], new_shape: tuple[int, ...], num_ranks: int, together: bool, left: int
) -> Placement | None:
    """``together``: with other cuts of the same dim, which have to be independent of each other; ``left``: what earlier
    ones leave of it.

    One rank holds all, whatever dim is named. It is the dim that more ranks would cut, so that ops which follow find the
    placements that they have on other meshes.
    """
    if num_ranks == 1 and isinstance(placement, InterleavedShard):
        for several in _prime_factors(left // placement.num_chunks):
            found = _in_shape(placement, shape, new_shape, several, together, left)
            if found is not None:
                return found
    if isinstance(placement, Shard | StridedShard | InterleavedShard):
        size, rest = divmod(left, split_factor(placement))
        inner = 1
        if rest:
            return None
    elif isinstance(placement, FlattenedShard):
        size, inner = placement.size, placement.inner
    else:
        return None
    dim = shard_dim(placement)
    assert dim is not None
    behind = inner * math.prod(shape[dim + 1 :])
    period = size * behind
    if not math.prod(new_shape) or not period:
        return None
    is_even = size % num_ranks == 0
    if isinstance(placement, InterleavedShard) and size == 1 and not together:
        # Chunks of one index are a dim of size 1, as a batch of one row of which only the first rank has any.
        for d, length in enumerate(new_shape):
            if length == 1 and math.prod(new_shape[d + 1 :]) == behind:
                return Shard(d)
    for d in _candidates(dim, shape, new_shape, behind):
        after = math.prod(new_shape[d + 1 :])
        outer, rest = divmod(new_shape[d] * after, period)
        if rest or not outer:
            continue
        if not is_even and behind % after == 0:
            if behind > after or together:
                return FlattenedShard(d, size, behind // after)
            return Shard(d) if outer == 1 else InterleavedShard(d, outer)
        if is_even and period // num_ranks % after == 0:  # equal parts may be counted in indices of any size
            if together:
                return FlattenedShard(d, period // after, 1)
            return Shard(d) if outer == 1 else InterleavedShard(d, outer)
    return None


def _prime_factors(number: int) -> list[int]:
    """Each once, in ascending order."""
    found = []
    factor = 2
    while number > 1:
        if factor * factor > number:
            factor = number
        if number % factor == 0:
            found.append(factor)
            while number % factor == 0:
                number //= factor
        factor += 1
    return found


def _candidates(dim: int, shape: tuple[int, ...], new_shape: tuple[int, ...], behind: int) -> list[int]:
    """Dims of the view, in the order in which they are tried. A cut of a single index can be described in any of them,
    also in one that a matmul sums over. First the same dim, then the dim that has indices on both sides of the cut.

    Args:
        behind: elements of one index of the cut.
    """

    def position(d: int) -> tuple[int, bool]:
        after = math.prod(new_shape[d + 1 :])
        if after == behind and new_shape[d] == shape[dim]:
            return 0, d != dim
        return (1 if after <= behind < after * new_shape[d] else 2), d != dim

    return sorted(range(len(new_shape)), key=position)


def _share_a_dim(spec: DTensorSpec, found: Placements) -> bool:
    """Whether several axes cut one dim, before the view or after it."""
    for placements in (spec.placements, found):
        wide = [p for axis, p in enumerate(placements) if spec.mesh.size(axis) > 1]
        dims = [dim for p in wide if (dim := shard_dim(p)) is not None]
        if len(dims) > len(set(dims)):
            return True
    return False


def _hold_the_same(spec: DTensorSpec, shape: Sequence[int], placements: Placements) -> bool:
    mesh_shape = tuple(spec.mesh.shape)
    return all(
        list(local_region(spec.shape, spec.placements, mesh_shape, where).runs())
        == list(local_region(shape, placements, mesh_shape, where).runs())
        for where in coordinates(mesh_shape)
    )


# The ragged placement that describes, for another global shape, the runs that the ranks hold already.


def regions(spec: DTensorSpec) -> list[Region]:
    """What every rank of the spec's mesh holds; the same list on every rank."""
    mesh_shape = tuple(spec.mesh.shape)
    return [local_region(spec.shape, spec.placements, mesh_shape, where) for where in coordinates(mesh_shape)]


def runs_of(spec: DTensorSpec) -> list[Interval]:
    """The run that every rank holds of the flattening that the ragged axis of the spec divides, by mesh coordinate."""
    return [region.flat for region in regions(spec) if region.flat is not None]


def refit_ragged(
    spec: DTensorSpec, shape: Sequence[int], others: Sequence[Placement], runs: Sequence[Interval]
) -> Placements | None:
    """Normalized placements of a tensor of ``shape`` of which the ranks of the spec's mesh hold ``runs``, in the row-major
    order of their coordinates.

    ``others`` are the placements on the other axes (its entry on the ragged axis is ignored). A candidate is taken only
    when it gives every rank of the mesh exactly its run; None when there is none.
    """
    axis = ragged_axis(spec.placements)
    assert axis is not None
    placement = spec.placements[axis]
    assert isinstance(placement, RaggedShard)
    mesh_shape = tuple(spec.mesh.shape)
    expected = list(runs)
    # Plain also where the spec has a StridedRaggedShard: normalization derives that from the other placements.
    plain = RaggedShard(placement.dims, placement.local_units, placement.block)
    for candidate in _refit_candidates(plain, axis, shape, mesh_shape, expected):
        try:
            placements = normalize_placements((*others[:axis], candidate, *others[axis + 1 :]), shape, mesh_shape)
            found = [local_region(shape, placements, mesh_shape, where).flat for where in coordinates(mesh_shape)]
        except ValueError:  # units that do not fit the new shape
            continue
        if found == expected:
            return placements
    return None


def _refit_candidates(
    placement: RaggedShard, axis: int, shape: Sequence[int], mesh_shape: tuple[int, ...], expected: list[Interval]
) -> Iterator[RaggedShard]:
    """The placement itself, then the same units as blocks, then one unit for each granule of the runs."""
    yield placement
    assert placement.local_units is not None
    first = [where for where in range(len(expected)) if _others_are_zero(where, axis, mesh_shape)]
    for dims in {placement.dims[: len(shape)], tuple(range(min(1, len(shape))))}:
        flattened = placement.with_dims(dims)
        yield flattened
        for units, where in zip(placement.local_units, first):
            begin, end = expected[where]
            if units and (end - begin) % units == 0 and end > begin:
                yield flattened.with_units(placement.local_units, (end - begin) // units)
                break
        granule = math.gcd(*(end - begin for begin, end in (expected[where] for where in first)))
        if granule:
            sizes = [(expected[where][1] - expected[where][0]) // granule for where in first]
            yield flattened.with_units(sizes, granule)
    if not math.prod(shape):
        yield RaggedShard()


def _others_are_zero(where: int, axis: int, mesh_shape: tuple[int, ...]) -> bool:
    """Whether the ``where``-th coordinate is 0 on every axis other than the ragged one."""
    coordinate = []
    for size in reversed(mesh_shape):
        where, index = divmod(where, size)
        coordinate.append(index)
    coordinate.reverse()
    return all(index == 0 for a, index in enumerate(coordinate) if a != axis)


_VIEWS = "view _unsafe_view reshape view_copy unsqueeze squeeze expand flatten"
VIEWS = names(_VIEWS + " slice")
_SIZED = names("view _unsafe_view")  # with a tensor and sizes as arguments

# Placements of a view are found by trial; the check enumerates contiguous runs and gives up beyond this many.
_MAX_RUNS = 1 << 16


def view_rule(call: OpCall) -> Decision | None:
    """A view that keeps the elements' order and number keeps the local elements: the local tensor shares memory.

    No communication. None when no placement describes the local elements in the new shape.
    """
    if call.name not in VIEWS or call.mutated or isinstance(call.argument("dtype"), torch.dtype):
        return None
    spec, shape = call.operands[0], tuple(call.meta.shape)
    if call.name == "expand" and shape != tuple(spec.shape):
        return _expand(spec, shape)
    if math.prod(shape) != math.prod(spec.shape):
        return None
    if ragged_axis(spec.placements) is not None:
        outputs = _ragged_view(spec, shape)
        flat_size = (-1,) if call.name in _SIZED else None
        return None if outputs is None else Decision((spec.placements,), (outputs,), _flat, local_sizes=flat_size)
    viewed = regrouped(spec, shape) if math.prod(shape) and is_cut_unevenly(spec) else None
    if viewed is None:
        viewed = next((p for p in _viewed(spec, shape) if holds_the_same(spec, shape, p)), None)
    if viewed is None:
        return None
    region = own_region(shape, viewed, spec.mesh)
    sizes = None if region is None or call.name not in _SIZED else region.local_shape
    local = functools.partial(_local_view, spec.mesh, shape, viewed)
    return Decision((spec.placements,), (viewed,), local, local_sizes=sizes)


def _expand(spec: DTensorSpec, shape: tuple[int, ...]) -> Decision | None:
    """Sharded dims stay as they are; others are repeated."""
    more = len(shape) - len(spec.shape)
    dims = {shard_dim(placement) for placement in spec.placements} - {None}
    if ragged_axis(spec.placements) is not None or any(
        spec.shape[dim] != shape[dim + more] for dim in dims if dim is not None
    ):
        return None
    sizes = tuple(-1 if d - more in dims else size for d, size in enumerate(shape))
    outputs = tuple(shift_dim(placement, more) for placement in spec.placements)
    return Decision((spec.placements,), (outputs,), functools.partial(_local_expand, sizes))


def _local_expand(sizes: tuple[int, ...], local: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return local.expand(sizes)


def _ragged_view(spec: DTensorSpec, shape: tuple[int, ...]) -> Placements | None:
    """The ragged runs stay the same if the view keeps the order of the elements that the other axes leave to a rank."""
    others: Placements = tuple(Replicate() if isinstance(p, RaggedShard) else p for p in spec.placements)
    if any(is_sharded(placement) for placement in others):
        left = with_placements(spec, others)
        found = next((p for p in _viewed(left, shape) if holds_the_same(left, shape, p)), None)
        if found is None:
            return None
        others = found
    return refit_ragged(spec, shape, others, runs_of(spec))


def _viewed(spec: DTensorSpec, shape: tuple[int, ...]) -> Iterator[Placements]:
    """Placements that may describe the same elements in the new shape, likely and simple ones first."""
    if not math.prod(shape):  # nothing: all do
        kept = {d for d, size in enumerate(shape[: len(spec.shape)]) if size == spec.shape[d]} | {None}
        yield tuple(p if shard_dim(p) in kept else Replicate() for p in spec.placements)
        return
    choices: list[list[Placement]] = []
    for axis, placement in enumerate(spec.placements):
        dim, pieces = shard_dim(placement), split_factor(placement)
        if dim is None:
            choices.append([placement])
            continue
        same = [d for d, size in enumerate(shape) if size == spec.shape[dim]]
        shards: list[Placement] = [Shard(d) for d, size in enumerate(shape) if size > 1 or d in same]
        if pieces > 1:
            interleaved: list[Placement] = [InterleavedShard(d, pieces) for d in range(len(shape))]
            shards = [interleaved[d] for d in same] + shards + interleaved
        choices.append(list(dict.fromkeys([*shards, *_regrouped(spec, axis, shape)])))
    yield from itertools.product(*choices)


def _regrouped(spec: DTensorSpec, axis: int, shape: tuple[int, ...]) -> Iterator[Placement]:
    """Placements for dims that are merged with dims before them, or split from them: a rank has as many pieces of the whole
    tensor as before, so the number of pieces of the new dim follows from the sizes before both dims, of what is left of them
    by the axes that cut them first."""
    placement = spec.placements[axis]
    dim, pieces = shard_dim(placement), split_factor(placement)
    assert dim is not None
    earlier = [i for i in range(axis) if (other := shard_dim(spec.placements[i])) is not None and other <= dim]
    cuts = (1, math.prod(spec.mesh.size(i) for i in earlier))
    total = math.prod(spec.shape[:dim]) * pieces
    for d, size in enumerate(shape):
        for before, after in itertools.product(cuts, cuts):
            found, rest = divmod(total * after, math.prod(shape[:d]) * before)
            if not rest and 1 < found <= size:
                yield InterleavedShard(d, found)


def holds_the_same(
    spec: DTensorSpec, shape: tuple[int, ...], placements: Placements, if_too_large: bool = False
) -> bool:
    """Whether every rank holds the same elements in the same order; ``if_too_large`` where that would take too long. Dims
    at either end that neither side shards and that the view leaves alone are shrunk to size 1, which changes nothing but
    the cost."""
    if not math.prod(shape):
        return True
    old, new = _shrunk(tuple(spec.shape), spec.placements, shape, placements)
    last = max(dim for p in spec.placements if (dim := shard_dim(p)) is not None)
    pieces = max(split_factor(p) for p in (*spec.placements, *placements))
    if math.prod(old[:last]) * pieces > _MAX_RUNS:
        return if_too_large
    mesh_shape = tuple(spec.mesh.shape)
    return all(
        list(local_region(old, spec.placements, mesh_shape, where).runs())
        == list(local_region(new, placements, mesh_shape, where).runs())
        for where in _deciding(mesh_shape, (old, spec.placements), (new, placements))
    )


def _deciding(
    mesh_shape: tuple[int, ...], *sides: tuple[tuple[int, ...], Sequence[Placement]]
) -> Iterator[tuple[int, ...]]:
    """Ranks that decide for all. Where all cuts are even, a rank holds what the first rank holds, moved by a multiple of
    each of its coordinates: the first rank and its neighbours decide. Else all ranks."""
    if not all(_is_even(shape, placements, mesh_shape) for shape, placements in sides):
        yield from coordinates(mesh_shape)
        return
    yield (0,) * len(mesh_shape)
    for axis, size in enumerate(mesh_shape):
        if size > 1:
            yield tuple(int(other == axis) for other in range(len(mesh_shape)))


def _is_even(shape: tuple[int, ...], placements: Sequence[Placement], mesh_shape: tuple[int, ...]) -> bool:
    """Whether all cuts are into equal parts; where a dim is cut in pieces for each rank, by the last axis that cuts it."""
    cuts = [1] * len(shape)
    in_pieces: set[int] = set()
    for placement, size in zip(placements, mesh_shape):
        dim, pieces = shard_dim(placement), split_factor(placement)
        if placement.is_replicate():
            continue
        if dim is None or dim in in_pieces or isinstance(placement, FlattenedShard):
            return False
        cuts[dim] *= size * pieces
        if pieces > 1:
            in_pieces.add(dim)
    return all(size % count == 0 for size, count in zip(shape, cuts))


def _shrunk(
    old: tuple[int, ...], old_placements: Sequence[Placement], new: tuple[int, ...], new_placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    old_dims = {shard_dim(placement) for placement in old_placements}
    new_dims = {shard_dim(placement) for placement in new_placements}
    before, after = list(old), list(new)
    for dim in range(min(len(old), len(new))):
        if old[dim] != new[dim]:
            break
        if dim not in old_dims and dim not in new_dims:
            before[dim] = after[dim] = 1
    for back in range(1, min(len(old), len(new)) + 1):
        if old[-back] != new[-back]:
            break
        if len(old) - back not in old_dims and len(new) - back not in new_dims:
            before[-back] = after[-back] = 1
    return tuple(before), tuple(after)


def _flat(local: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return local.view(-1)


def _local_view(
    mesh: DeviceMesh, shape: tuple[int, ...], placements: Placements, local: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    region = own_region(shape, placements, mesh)
    assert region is not None  # only ranks of the mesh run local functions
    return local.view(region.local_shape)


def _is_pending(op: Any, schema: Any) -> bool:
    spec = schema.args_schema[0]
    return isinstance(spec, DTensorSpec) and any(p.is_partial() for p in spec.placements)


@handles(torch.ops.aten.view.dtype, applies=_is_pending)
def _reinterpreted(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The bits of the value. PyTorch's rule adds up those of the terms of a pending sum."""
    x = args[0]
    return op(bring(x, without_partials(x.placements), str(op), "self"), *args[1:], **kwargs)


register_aten(_VIEWS, rule=view_rule)


# ``x.transpose_(0, 1)``, ``x.squeeze_()`` and the like: another look at the same elements, written onto ``x`` itself.
# Stock DTensor has no rule for most of them, and lets ``squeeze_`` change the local tensor only: the DTensor keeps its
# shape.

_aten = torch.ops.aten
_OUT_OF_PLACE = {
    _aten.squeeze_.default: _aten.squeeze.default,
    _aten.squeeze_.dim: _aten.squeeze.dim,
    _aten.squeeze_.dims: _aten.squeeze.dims,
    _aten.transpose_.default: _aten.transpose.int,
    _aten.unsqueeze_.default: _aten.unsqueeze.default,
}


@handles(*_OUT_OF_PLACE)
def _in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    view = _OUT_OF_PLACE[op](*args, **kwargs)
    return correct_inplace_view(op, args, kwargs, local_of(view), spec_of(view))
