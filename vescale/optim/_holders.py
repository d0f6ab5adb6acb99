"""Which ranks hold parts of a parameter's matrices: index arithmetic over placements, the same on all ranks."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch.distributed.tensor.placement_types import Placement

from vescale.optim._matrix_blocks import MatrixGrid
from vescale.placements import RaggedShard, is_sharded, largest_shape, local_region, ragged_axis, shard_dim

__all__ = ["Holding", "holdings", "replica_axes", "shard_axes"]

Coordinate = tuple[int, ...]


@dataclass(frozen=True)
class Holding:
    """Where the parts of one matrix are.

    Attributes:
        fixed: for each mesh axis the only coordinate at which there are parts; None where there are at several, and on
            axes that replicate.
        is_kept: the placements never cut such a matrix (its block is whole matrices), so that each has one owner by
            layout.
    """

    fixed: tuple[int | None, ...]
    is_kept: bool


def shard_axes(placements: Sequence[Placement], mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """Axes whose ranks hold different parts."""
    return tuple(axis for axis, p in enumerate(placements) if is_sharded(p) and mesh_shape[axis] > 1)


def replica_axes(placements: Sequence[Placement], mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """Axes whose ranks hold the same."""
    return tuple(axis for axis, p in enumerate(placements) if not is_sharded(p) and mesh_shape[axis] > 1)


@functools.lru_cache(maxsize=16384)
def holdings(grid: MatrixGrid, placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]) -> tuple[Holding, ...]:
    """One for each of ``grid.boxes``. Pure; looks at the ranks that hold something only."""
    axes = shard_axes(placements, mesh_shape)
    boxes = grid.boxes
    number = {box.offset: index for index, box in enumerate(boxes)}
    found: list[list[int | None] | None] = [None] * len(boxes)
    for coordinate in _holding_coordinates(placements, mesh_shape, axes):
        region = local_region(grid.shape, placements, mesh_shape, coordinate)
        for block in {number[o] for box in region.boxes for o in _offsets(grid, box.offset, box.sizes)}:
            known = found[block]
            if known is None:
                found[block] = list(coordinate)
            else:
                for axis in axes:
                    if known[axis] != coordinate[axis]:
                        known[axis] = None
    replicas = replica_axes(placements, mesh_shape)
    kept = _keeps(grid, placements, mesh_shape)
    result = []
    for box, known in zip(boxes, found):
        assert known is not None, "a matrix that no rank holds"
        for axis in replicas:
            known[axis] = None
        whole = all(known[axis] is not None for axis in axes)
        result.append(Holding(tuple(known), whole and kept(math.prod(box.sizes))))
    return tuple(result)


def _holding_coordinates(
    placements: Sequence[Placement], mesh_shape: Sequence[int], axes: Sequence[int]
) -> Iterator[Coordinate]:
    """Coordinates on the axes that shard, the others at 0; without those to which a ragged cut gives nothing."""
    choices: list[Sequence[int]] = []
    for axis, placement in enumerate(placements):
        indices: Sequence[int] = range(mesh_shape[axis]) if axis in axes else (0,)
        if isinstance(placement, RaggedShard) and placement.local_units is not None and axis in axes:
            indices = [index for index in indices if placement.local_units[index]]
        choices.append(indices)
    return itertools.product(*choices)


def _offsets(grid: MatrixGrid, offset: Sequence[int], sizes: Sequence[int]) -> Iterator[Coordinate]:
    """Offsets of the blocks that meet the box at ``offset``."""
    ranges = []
    for borders, start, size in zip(grid.cuts, offset, sizes):
        first = bisect.bisect_right(borders, start) - 1
        last = bisect.bisect_left(borders, start + size)
        ranges.append(borders[first:last])
    return itertools.product(*ranges)


def _keeps(grid: MatrixGrid, placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]) -> Callable[[int], bool]:
    """Whether a ragged cut was asked for whose blocks are whole matrices of so many elements. Whole rows of a stack, which
    is what a ragged cut without a block gives to one rank, are not asked for."""
    axis = ragged_axis(placements)
    if axis is None:
        return lambda numel: False
    placement = placements[axis]
    assert isinstance(placement, RaggedShard)
    if placement.block is None:
        return lambda numel: not placement.dims
    left = largest_shape(grid.shape, placements, mesh_shape)
    inner = [dim for p in placements if (dim := shard_dim(p)) is not None and dim > 0]
    granule, total = placement.granule(left, inner), math.prod(left)
    return lambda numel: granule % numel == 0 or granule >= total
