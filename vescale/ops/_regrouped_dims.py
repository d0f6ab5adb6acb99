"""Placements of views that flatten and split dims which the ranks do not divide.

PyTorch describes the shards of a flattened dim with ``Shard`` and ``_StridedShard``, which it can where shards are equal,
and gathers or refuses otherwise. :class:`FlattenedShard` describes all others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import DTensorSpec, StridedShard
from vescale.ops._call import Placements
from vescale.placements import (
    FlattenedShard,
    InterleavedShard,
    coordinates,
    is_sharded,
    local_region,
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
