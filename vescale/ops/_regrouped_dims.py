"""Placements of views that flatten and split dims which the ranks do not divide.

PyTorch describes the shards of a flattened dim with ``Shard`` and ``_StridedShard``, which it can where shards are equal,
and gathers or refuses otherwise. :class:`FlattenedShard` describes all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import DTensorSpec, StridedShard
from vescale.ops._call import Placements
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
    ragged_axis,
    shard_dim,
    split_factor,
)


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
