"""The elements of a global tensor that one coordinate of a mesh holds, for every placement: pure index arithmetic.

A local tensor is described by a :class:`Region`. The shard-like placements (``Shard``, stock ``_StridedShard``,
``InterleavedShard``, ``FlattenedShard``) act on one dim each, left to right over the mesh axes, and leave a *product* of
per-dim interval lists. A ragged placement, whatever its axis, then takes one contiguous run of the row-major flattening of
that product. Everything else in this package (redistribution, checkpoint boxes, random numbers) is derived from this value.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from vescale.errors import PlacementError
from vescale.placements._pieced_shards import FlattenedShard
from vescale.placements._placement_kinds import contiguous_stride, is_sharded, ragged_axis, shard_dim, split_factor
from vescale.placements._ragged import RaggedShard

# Intervals of indices of one dim: what shard-like placements leave of it to a rank.

Interval = tuple[int, int]


def _chunk(size: int, num_chunks: int, index: int) -> Interval:
    """``torch.chunk`` semantics, with empty chunks at the end."""
    step = -(-size // num_chunks)
    return min(size, step * index), min(size, step * (index + 1))


def strided_chunks(size: int, num_pieces: int, num_ranks: int, index: int) -> list[Interval]:
    """The dim is chunked into pieces, each piece over the ranks; rank ``index`` holds its chunk of every piece."""
    found = []
    for piece in range(num_pieces):
        start, stop = _chunk(size, num_pieces, piece)
        low, high = _chunk(stop - start, num_ranks, index)
        if low < high:
            found.append((start + low, start + high))
    return found


def middle_chunks(
    shape: tuple[int, ...], placement: FlattenedShard, num_ranks: int, index: int
) -> tuple[Interval, ...]:
    """Global indices of a dim that is the flattening of ``(outer, size, inner)``, of which ``size`` is chunked."""
    length, period = shape[placement.dim], placement.size * placement.inner
    if length % period:
        raise PlacementError(
            f"{placement!r}: dim {placement.dim} of the tensor of shape {shape} is not a flattening of dims of sizes "
            f"(..., {placement.size}, {placement.inner}); its size {length} must be a multiple of {period}"
        )
    low, high = (bound * placement.inner for bound in _chunk(placement.size, num_ranks, index))
    if low == high:
        return ()
    if high - low == period:
        return ((0, length),) if length else ()
    return tuple((start + low, start + high) for start in range(0, length, period))


def common(a: tuple[Interval, ...], b: tuple[Interval, ...]) -> tuple[Interval, ...]:
    """The intersection of two lists of intervals of ascending indices."""
    found: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        low, high = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if low < high:
            found.append((low, high))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def clip(ranges: tuple[Interval, ...], low: int, high: int) -> list[tuple[int, int, int]]:
    """Local indices ``[low, high)`` of a concatenation of ranges as ``(global start, local start, length)`` pieces."""
    found = []
    first = 0
    for start, stop in ranges:
        lo, hi = max(low, first), min(high, first + stop - start)
        if lo < hi:
            found.append((start + lo - first, lo, hi - lo))
        first += stop - start
    return found


def global_index(ranges: tuple[Interval, ...], index: int) -> int:
    for start, stop in ranges:
        if index < stop - start:
            return start + index
        index -= stop - start
    raise IndexError(index)


@dataclass(frozen=True, slots=True)
class Box:
    """An N-D block of the global tensor inside one local tensor.

    ``offset`` and ``sizes`` are global. ``local_start`` locates the block in the local tensor: one index per dim, or
    for a flat local tensor the single index of the block's first element; ``local_strides`` are then its strides there.
    """

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    local_start: tuple[int, ...]
    local_strides: tuple[int, ...] | None

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def view(self, local: torch.Tensor) -> torch.Tensor:
        """The block as a view of the local tensor (shape ``sizes``); shares memory, so it can be written to."""
        if self.local_strides is not None:
            stride = local.stride(0) if local.ndim else 1
            offset = local.storage_offset() + self.local_start[0] * stride
            return local.as_strided(self.sizes, [s * stride for s in self.local_strides], offset)
        for dim, (start, size) in enumerate(zip(self.local_start, self.sizes, strict=True)):
            local = local.narrow(dim, start, size)
        return local

    def intersect(self, other: Box) -> tuple[Box, Box] | None:
        """The common block, seen from this local tensor and from the other's; None when they are disjoint."""
        common = self.part_in(other.offset, other.sizes)
        return None if common is None else (common, other._cut(common.offset, common.sizes))

    def part_in(self, offset: tuple[int, ...], sizes: tuple[int, ...]) -> Box | None:
        """The part of this block within a block of the global tensor; None when they are disjoint."""
        starts = tuple(map(max, self.offset, offset))
        sizes = tuple(
            min(a + m, b + n) - start for a, m, b, n, start in zip(self.offset, self.sizes, offset, sizes, starts)
        )
        return None if sizes and min(sizes) <= 0 else self._cut(starts, sizes)

    def _cut(self, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
        if sizes == self.sizes:  # a part of the same sizes is the block itself
            return self
        shift = tuple(start - own for start, own in zip(starts, self.offset))
        if self.local_strides is None:
            start = tuple(own + by for own, by in zip(self.local_start, shift))
        else:
            start = (self.local_start[0] + sum(by * s for by, s in zip(shift, self.local_strides)),)
        return Box(starts, sizes, start, self.local_strides)


@dataclass(frozen=True)
class Region:
    """The elements of a global tensor in one local tensor, in local order.

    Attributes:
        global_shape: the logical tensor's shape.
        intervals: for each dim the ordered ``(start, stop)`` ranges of global indices that the rank holds; their
            concatenation is the local dim. Their product is the local tensor, unless it is flat.
        flat: ``(begin, end)`` of the row-major flattening of that product, for a ragged placement; None otherwise.
    """

    global_shape: tuple[int, ...]
    intervals: tuple[tuple[Interval, ...], ...]
    flat: Interval | None = None

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the product of the intervals: the local tensor before a ragged placement flattens it."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.intervals)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor: 1-D for a ragged placement."""
        return self.shape if self.flat is None else (self.flat[1] - self.flat[0],)

    @property
    def numel(self) -> int:
        return math.prod(self.local_shape)

    @functools.cached_property
    def rows(self) -> Interval:
        """The smallest range of dim 0 that holds the region; ``(0, 0)`` for an empty one."""
        if not self.boxes or not self.shape:
            return 0, len(self.boxes)
        return min(box.offset[0] for box in self.boxes), max(box.offset[0] + box.sizes[0] for box in self.boxes)

    @functools.cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The region as disjoint N-D blocks, in local order; at most ``2 * ndim - 1`` for one ragged run without
        interleaving."""
        if self.numel == 0:
            return ()
        if self.flat is None:
            return tuple(self._split((0,) * len(self.shape), self.shape, None))
        strides = contiguous_stride(self.shape)
        found: list[Box] = []
        for start, sizes in _run_blocks(self.shape, *self.flat):
            found += self._split(start, sizes, strides)
        return tuple(found)

    def _split(self, start: tuple[int, ...], sizes: tuple[int, ...], strides: tuple[int, ...] | None) -> list[Box]:
        """A block of the product (local indices) cut along the interval borders into blocks of the global tensor."""
        pieces = [clip(ranges, lo, lo + n) for ranges, lo, n in zip(self.intervals, start, sizes)]
        found = []
        for combination in itertools.product(*pieces):
            local_start = tuple(local for _, local, _ in combination)
            if strides is not None:
                flat_begin = self.flat[0] if self.flat else 0
                local_start = (sum(i * s for i, s in zip(local_start, strides)) - flat_begin,)
            found.append(
                Box(tuple(g for g, _, _ in combination), tuple(n for _, _, n in combination), local_start, strides)
            )
        return found

    def global_offset(self, index: int) -> int:
        """Row-major global offset of the ``index``-th element of the local tensor."""
        rest = index + (self.flat[0] if self.flat is not None else 0)
        offset, stride = 0, 1
        for ranges, size, held in zip(reversed(self.intervals), reversed(self.global_shape), reversed(self.shape)):
            rest, place = divmod(rest, held)
            offset += global_index(ranges, place) * stride
            stride *= size
        return offset

    def runs(self) -> Iterator[tuple[int, int]]:
        """``(global row-major offset, length)`` of the maximal contiguous runs, in local order.

        The k-th element of the local tensor (row-major) is the k-th element of the concatenated runs.
        """
        begin, end = self.flat if self.flat is not None else (0, math.prod(self.shape))
        pending: tuple[int, int] | None = None
        for start, length in self._product_runs(begin, end):
            if pending is not None and pending[0] + pending[1] == start:
                pending = (pending[0], pending[1] + length)
                continue
            if pending is not None:
                yield pending
            pending = (start, length)
        if pending is not None:
            yield pending

    def _product_runs(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Contiguous runs (not merged) of local elements ``[begin, end)`` of the product, in row-major local order."""
        if begin >= end:
            return
        strides = contiguous_stride(self.global_shape)
        # Dims held whole form one contiguous block behind the last dim that is cut.
        inner = len(self.shape)
        while inner > 0 and self.intervals[inner - 1] == ((0, self.global_shape[inner - 1]),):
            inner -= 1
        if inner == 0:
            yield begin, end - begin
            return
        row = math.prod(self.shape[inner:])  # elements behind one index of dim `inner - 1`
        cut = inner - 1
        segment_starts = list(itertools.accumulate((b - a for a, b in self.intervals[cut]), initial=0))
        line = segment_starts[-1] * row  # elements behind one combination of the outer indices
        for outer in range(begin // line, -(-end // line)):
            base, rest = 0, outer
            for dim in range(cut - 1, -1, -1):
                rest, index = divmod(rest, self.shape[dim])
                base += global_index(self.intervals[dim], index) * strides[dim]
            low, high = max(begin - outer * line, 0), min(end - outer * line, line)
            for (start, stop), first in zip(self.intervals[cut], segment_starts):
                lo, hi = max(low, first * row), min(high, (first + stop - start) * row)
                if lo < hi:
                    yield base + start * strides[cut] + lo - first * row, hi - lo


def local_region(
    global_shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> Region:
    """The region that ``coordinate`` of a mesh of ``mesh_shape`` holds. Pure and cached; no communication.

    ``Replicate`` and ``Partial`` hold everything on their axis; ``Shard`` follows ``torch.chunk``; at most one axis may
    be ragged, and it is applied after all others. Raises ValueError for dims out of range or ragged units that do not
    fit the tensor; the error does not depend on the coordinate, so all ranks raise it.
    """
    return _local_region(tuple(global_shape), tuple(placements), tuple(mesh_shape), tuple(coordinate))


def own_region(shape: Sequence[int], placements: Sequence[Placement], mesh: DeviceMesh) -> Region | None:
    """The region of the calling rank, or None on a rank outside of the mesh. No communication."""
    coordinate = mesh.get_coordinate()
    return None if coordinate is None else local_region(shape, placements, tuple(mesh.shape), coordinate)


def coordinates(mesh_shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The coordinates of a mesh, in row-major order."""
    return itertools.product(*map(range, mesh_shape))


@functools.lru_cache(maxsize=65536)
def _local_region(
    global_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> Region:
    product = _shard_product(global_shape, placements, mesh_shape, coordinate)
    axis = ragged_axis(placements)
    if axis is None:
        return product
    placement = placements[axis]
    assert isinstance(placement, RaggedShard)
    largest = largest_shape(global_shape, placements, mesh_shape)
    inner_dims = [dim for p in placements if (dim := shard_dim(p)) is not None and dim > 0]
    flat = placement.run(product.shape, largest, mesh_shape[axis], coordinate[axis], inner_dims)
    return Region(global_shape, product.intervals, flat)


@functools.lru_cache(maxsize=4096)
def largest_shape(
    global_shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]
) -> tuple[int, ...]:
    """For each dim the most indices that the shard-like placements leave to any coordinate: what ragged shares count in.

    Some coordinate holds the most of all dims at once. It is the first, unless pieces (of interleaved and strided
    placements) are cut from parts of unequal length: of 5 rows in 4 pieces the first of two ranks has 3, of 4 rows all 4.
    """
    origin = (0,) * len(mesh_shape)
    shape = list(_shard_product(global_shape, placements, mesh_shape, origin).shape)
    for dim in range(len(shape)):
        axes = [axis for axis, placement in enumerate(placements) if shard_dim(placement) == dim]
        flattened = any(isinstance(placements[axis], FlattenedShard) for axis in axes)
        if not flattened and all(split_factor(placements[axis]) == 1 for axis in axes[1:]):
            continue
        for indices in itertools.product(*(range(mesh_shape[axis]) for axis in axes)):
            along = dict(zip(axes, indices))
            coordinate = tuple(along.get(axis, 0) for axis in range(len(mesh_shape)))
            held = _shard_product(global_shape, placements, mesh_shape, coordinate).shape
            shape[dim] = max(shape[dim], held[dim])
    return tuple(shape)


@functools.lru_cache(maxsize=4096)
def same_regions(
    global_shape: tuple[int, ...], a: tuple[Placement, ...], b: tuple[Placement, ...], mesh_shape: tuple[int, ...]
) -> bool:
    """Whether every coordinate holds the same elements in the same order under both placements."""
    if all(p == q or not (is_sharded(p) or is_sharded(q)) for p, q in zip(a, b, strict=True)):
        return True
    return all(
        local_region(global_shape, a, mesh_shape, coordinate) == local_region(global_shape, b, mesh_shape, coordinate)
        for coordinate in coordinates(mesh_shape)
    )


def _shard_product(
    global_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> Region:
    """What the shard-like placements alone leave to a coordinate."""
    intervals: list[tuple[Interval, ...]] = [((0, size),) for size in global_shape]
    for placement, num_ranks, index in zip(placements, mesh_shape, coordinate, strict=True):
        dim = shard_dim(placement)
        if dim is None:
            continue
        if not 0 <= dim < len(global_shape):
            raise PlacementError(
                f"{placement!r} names tensor dim {dim}, but the tensor of shape {global_shape} has "
                f"{len(global_shape)} dims; use a dim in [0, {len(global_shape)})"
            )
        if isinstance(placement, FlattenedShard):
            intervals[dim] = common(intervals[dim], middle_chunks(global_shape, placement, num_ranks, index))
            continue
        size = sum(stop - start for start, stop in intervals[dim])
        picked: list[Interval] = []
        for low, high in strided_chunks(size, split_factor(placement), num_ranks, index):
            for global_start, _, length in clip(intervals[dim], low, high):
                if picked and picked[-1][1] == global_start:  # neighbours merge: one interval, fewer copies
                    picked[-1] = (picked[-1][0], global_start + length)
                else:
                    picked.append((global_start, global_start + length))
        intervals[dim] = tuple(picked)
    return Region(global_shape, tuple(intervals))


def _run_blocks(shape: tuple[int, ...], begin: int, end: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements ``[begin, end)`` of the row-major flattening as ``(start, sizes)`` blocks, in order.

    A run is a head inside one slice of dim 0, whole slices, and a tail: each end recurses into one dim less.
    """
    if begin >= end:
        return []
    if not shape:
        return [((), ())]
    plane = math.prod(shape[1:])
    first, head = divmod(begin, plane)
    last, tail = divmod(end, plane)
    if len(shape) == 1:
        return [((begin,), (end - begin,))]

    def within(index: int, low: int, high: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [((index, *start), (1, *sizes)) for start, sizes in _run_blocks(shape[1:], low, high)]

    if first == last:
        return within(first, head, tail)
    found = []
    if head:
        found += within(first, head, plane)
        first += 1
    if first < last:
        found.append(((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return found + (within(last, 0, tail) if tail else [])
