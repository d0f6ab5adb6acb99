"""Blocks of a global tensor that are quantized together, and the part of them that each rank holds.

Borders of blocks are those of the global tensor. A rank must hold its blocks whole, so that it needs no other rank for them;
in its local tensor, blocks then follow each other in the same order, and start anew at the same places.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.errors import UnevenBlocksError
from vescale.placements import (
    InterleavedShard,
    RaggedShard,
    Region,
    coordinates,
    largest_shape,
    local_region,
    normalize_placements,
    ragged_axis,
    shard_dim,
    split_factor,
)


@dataclass(frozen=True)
class Cut:
    """A block that two ranks would share.

    Attributes:
        block: its index in the grid of blocks, as text.
        elements: what it consists of, as text.
        coordinate: of the rank whose part ends inside of the block.
    """

    block: str
    elements: str
    coordinate: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """Consecutive elements of a local tensor: ``matrices`` of ``rows x columns``, in blocks of ``block_rows x
    block_columns`` that start anew in each matrix. The last ones of a row or column of blocks may be short."""

    matrices: int
    rows: int
    columns: int
    block_rows: int
    block_columns: int

    @property
    def numel(self) -> int:
        return self.matrices * self.rows * self.columns

    @property
    def bands(self) -> int:
        return -(-self.rows // self.block_rows)

    @property
    def num_blocks(self) -> int:
        return self.matrices * self.bands * -(-self.columns // self.block_columns)


class Blocks(ABC):
    """How tensors are divided into blocks. Values: the same on all ranks."""

    @abstractmethod
    def grid(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of what has one value for each block of a tensor of ``shape``."""

    @abstractmethod
    def granule(self, shape: Sequence[int]) -> int:
        """Consecutive elements of a tensor of ``shape`` that must not be cut, such that no block is."""

    @abstractmethod
    def parts(self, region: Region) -> list[Part]:
        """The local tensor of a region that cuts no block, in its order."""

    def first_cut(self, shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]) -> Cut | None:
        """The first block that a rank boundary cuts; None: there is none. The same on every rank; no communication."""
        return self._first_cut(tuple(shape), tuple(placements), tuple(mesh_shape))

    def grid_placements(
        self, shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]
    ) -> tuple[Placement, ...]:
        """The placements of a tensor of :meth:`grid` with which each rank holds the values of its own blocks, in order.

        Raises UnevenBlocksError where no placements say that.
        """
        return self._grid_placements(tuple(shape), tuple(placements), tuple(mesh_shape))

    def uneven(
        self, shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]
    ) -> UnevenBlocksError:
        return UnevenBlocksError(
            f"a tensor of shape {shape} is placed as {placements} on a mesh of {mesh_shape}, which would give ranks "
            f"uneven numbers of {self}, for which there is no placement; shard it evenly, or over a single axis"
        )

    @abstractmethod
    def _first_cut(
        self, shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]
    ) -> Cut | None: ...

    @abstractmethod
    def _grid_placements(
        self, shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]
    ) -> tuple[Placement, ...]: ...


def products(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], Region]]:
    """What the placements but a ragged one leave to each coordinate of the axes that they cut (0 on all others)."""
    cut = [Replicate() if isinstance(p, RaggedShard) else p for p in placements]
    sizes = [n if shard_dim(p) is not None else 1 for p, n in zip(cut, mesh_shape)]
    for coordinate in coordinates(sizes):
        yield coordinate, local_region(shape, cut, mesh_shape, coordinate)


def run_ends(
    largest: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...], held: tuple[int, ...]
) -> list[int]:
    """Where the runs of the ragged axis' ranks end in a local tensor of shape ``held``; as ``RaggedShard.run`` says."""
    axis = ragged_axis(placements)
    assert axis is not None
    placement = placements[axis]
    assert isinstance(placement, RaggedShard)
    inner_dims = [dim for p in placements if (dim := shard_dim(p)) is not None and dim > 0]
    resolved = placement.resolve(largest, mesh_shape[axis], inner_dims)
    units = resolved.local_units
    assert units is not None
    share = (
        resolved.granule(largest, inner_dims)
        if resolved.block is not None
        else math.prod(largest) // max(1, sum(units))
    )
    numel = math.prod(held)
    if inner_dims and numel:
        behind = min(inner_dims)
        share = share // math.prod(largest[behind:]) * math.prod(held[behind:])
    return [min(int(end) * share, numel) for end in np.cumsum(units)]


def ragged_ends(
    shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    region: Region,
) -> Iterator[tuple[tuple[int, ...], int]]:
    """(the coordinate of a rank, where its run ends in the product of the other axes); nothing without a ragged axis."""
    axis = ragged_axis(placements)
    if axis is None:
        return
    largest = largest_shape(shape, placements, mesh_shape)
    for index, end in enumerate(run_ends(largest, placements, mesh_shape, region.shape)):
        yield (*coordinate[:axis], index, *coordinate[axis + 1 :]), end


def counts(ends: Sequence[int]) -> list[int]:
    return [end - before for before, end in zip([0, *ends], ends)]


# Blocks of consecutive elements of the flattened tensor.


@dataclass(frozen=True)
class FlatBlocks(Blocks):
    """``size`` consecutive elements of the flattened tensor; the last block may be short."""

    size: int

    def __str__(self) -> str:
        return f"blocks of {self.size} elements"

    def grid(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (-(-math.prod(shape) // self.size),)

    def granule(self, shape: Sequence[int]) -> int:
        return self.size

    def parts(self, region: Region) -> list[Part]:
        return [Part(1, 1, region.numel, 1, self.size)] if region.numel else []

    def _element(self, offset: int, numel: int, coordinate: tuple[int, ...]) -> Cut:
        block = offset // self.size
        return Cut(str(block), f"elements {block * self.size} to {min((block + 1) * self.size, numel) - 1}", coordinate)

    @functools.lru_cache(maxsize=4096)  # noqa: B019 (values, few of them)
    def _first_cut(
        self, shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]
    ) -> Cut | None:
        numel = math.prod(shape)
        for coordinate, region in products(shape, placements, mesh_shape):
            offset = self._unaligned_end(region)
            if offset is not None:
                return self._element(offset, numel, coordinate)
            for place, end in ragged_ends(shape, placements, mesh_shape, coordinate, region):
                if end % self.size and end != region.numel:
                    return self._element(region.global_offset(end), numel, place)
        return None

    def _unaligned_end(self, region: Region) -> int | None:
        """The first global offset at which a run of the region ends inside of a block."""
        shape = region.global_shape
        cut = next((dim for dim in reversed(range(len(shape))) if region.intervals[dim] != ((0, shape[dim]),)), None)
        if cut is None or region.numel == 0:
            return None
        inner, numel = math.prod(shape[cut + 1 :]), math.prod(shape)
        outer = np.zeros(1, dtype=np.int64)
        if shape[cut] * inner % self.size:  # otherwise every row starts at the border of a block
            for dim in range(cut):
                held = np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in region.intervals[dim]])
                outer = (outer[:, None] + held * math.prod(shape[dim + 1 :])).reshape(-1)
        ends = np.array([stop * inner for _, stop in region.intervals[cut]], dtype=np.int64)
        found = (outer[:, None] + ends).reshape(-1)
        found = found[(found % self.size != 0) & (found != numel)]
        return int(found[0]) if found.size else None

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def _grid_placements(
        self, shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]
    ) -> tuple[Placement, ...]:
        grid = self.grid(shape)
        held, is_even = list(shape), True
        found: list[Placement] = []
        for placement, num_ranks in zip(placements, mesh_shape, strict=True):
            dim = shard_dim(placement)
            if dim is None:
                found.append(Replicate())
                continue
            factor = split_factor(placement)
            pieces = math.prod(held[:dim]) * factor
            if held[dim] <= factor:  # each piece is one index, which the first rank gets: all blocks, one by one
                pieces = max(1, -(-math.prod(held) // self.size))
            found.append(Shard(0) if pieces == 1 else InterleavedShard(0, pieces))
            is_even &= held[dim] % (factor * num_ranks) == 0
            held[dim] = factor * -(-held[dim] // (factor * num_ranks))
        if not is_even:  # even cuts are the same for blocks and elements
            for coordinate, region in products(shape, placements, mesh_shape):
                runs = [(begin // self.size, -(-length // self.size)) for begin, length in region.runs()]
                if runs != list(local_region(grid, found, mesh_shape, coordinate).runs()):
                    return self._explicit(grid, shape, placements, mesh_shape)
        axis = ragged_axis(placements)
        if axis is None:
            return tuple(found)
        largest = largest_shape(shape, placements, mesh_shape)
        ends = [-(-end // self.size) for end in run_ends(largest, placements, mesh_shape, largest)]
        found[axis] = RaggedShard((0,), counts(ends))
        try:
            placed = normalize_placements(found, grid, mesh_shape)
        except ValueError as error:  # shares of uneven parts
            raise self.uneven(shape, placements, mesh_shape) from error
        if not is_even:
            for coordinate in coordinates(mesh_shape):
                numel = local_region(shape, placements, mesh_shape, coordinate).numel
                if -(-numel // self.size) != local_region(grid, placed, mesh_shape, coordinate).numel:
                    raise self.uneven(shape, placements, mesh_shape)
        return placed

    def _explicit(
        self,
        grid: tuple[int, ...],
        shape: tuple[int, ...],
        placements: tuple[Placement, ...],
        mesh_shape: tuple[int, ...],
    ) -> tuple[Placement, ...]:
        """Counts of blocks for each rank of the one axis that cuts the tensor, unevenly, into consecutive runs."""
        axes = [axis for axis, p in enumerate(placements) if shard_dim(p) is not None and mesh_shape[axis] > 1]
        if len(axes) == 1 and ragged_axis(placements) is None:
            regions = [region for _, region in products(shape, placements, mesh_shape)]
            runs = [list(region.runs()) for region in regions]
            starts = [run[0][0] for run in runs if run]
            if all(len(run) <= 1 for run in runs) and starts == sorted(starts):
                found: list[Placement] = [Replicate()] * len(placements)
                found[axes[0]] = RaggedShard((0,), [-(-region.numel // self.size) for region in regions])
                return normalize_placements(found, grid, mesh_shape)
        raise self.uneven(shape, placements, mesh_shape)


# Blocks of some rows and columns of each matrix.


@dataclass(frozen=True)
class RowBlocks(Blocks):
    """Tiles of ``rows x columns`` of each matrix (the last two dims); those at the end of a dim may be short. Vectors, and
    matrices of one row, have blocks of ``columns`` elements."""

    rows: int
    columns: int

    def __str__(self) -> str:
        return f"blocks of {self.rows} x {self.columns}"

    def grid(self, shape: Sequence[int]) -> tuple[int, ...]:
        if is_row(shape):
            return FlatBlocks(self.columns).grid(shape)
        return (*shape[:-2], -(-shape[-2] // self.rows), -(-shape[-1] // self.columns))

    def granule(self, shape: Sequence[int]) -> int:
        """A band of rows; whole matrices of a stack where bands do not divide them."""
        if is_row(shape):
            return self.columns
        rows = self.rows if shape[-2] % self.rows == 0 or math.prod(shape[:-2]) == 1 else shape[-2]
        return max(1, min(rows, shape[-2]) * shape[-1])

    def parts(self, region: Region) -> list[Part]:
        if is_row(region.global_shape):
            return FlatBlocks(self.columns).parts(region)
        *_, rows, columns = region.shape
        begin, end = region.flat if region.flat is not None else (0, region.numel)
        if begin == end:
            return []
        first, last = begin // columns, end // columns
        if rows % self.rows == 0 or last - first <= rows - first % rows:
            return [self._part(1, last - first, columns)]
        found = []
        if first % rows:
            found.append(self._part(1, rows - first % rows, columns))
            first += found[0].rows
        if last // rows > first // rows:
            found.append(self._part(last // rows - first // rows, rows, columns))
        if last % rows:
            found.append(self._part(1, last % rows, columns))
        return found

    def _part(self, matrices: int, rows: int, columns: int) -> Part:
        return Part(matrices, rows, columns, self.rows, self.columns)

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def _first_cut(
        self, shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]
    ) -> Cut | None:
        if is_row(shape):
            return FlatBlocks(self.columns)._first_cut(shape, placements, mesh_shape)
        for coordinate, region in products(shape, placements, mesh_shape):
            for dim, size in ((-2, self.rows), (-1, self.columns)):
                for _, stop in region.intervals[dim]:
                    if stop % size and stop != shape[dim] and region.numel:
                        index = [ranges[0][0] for ranges in region.intervals]
                        index[dim] = stop
                        return self._tile(index, shape, coordinate)
            *_, rows, columns = region.shape
            for place, end in ragged_ends(shape, placements, mesh_shape, coordinate, region):
                row, rest = divmod(end, columns)
                if end != region.numel and (rest or row % rows % self.rows):
                    offset, index = region.global_offset(end), []
                    for size in reversed(shape):
                        offset, at = divmod(offset, size)
                        index.insert(0, at)
                    return self._tile(index, shape, place)
        return None

    def _tile(self, index: Sequence[int], shape: tuple[int, ...], coordinate: tuple[int, ...]) -> Cut:
        *matrix, row, column = index
        band, tile = row // self.rows, column // self.columns
        last_row = min((band + 1) * self.rows, shape[-2]) - 1
        last_column = min((tile + 1) * self.columns, shape[-1]) - 1
        return Cut(
            str((*matrix, band, tile)),
            (f"matrix {tuple(matrix)}, " if matrix else "")
            + f"rows {band * self.rows} to {last_row}, columns {tile * self.columns} to {last_column}",
            coordinate,
        )

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def _grid_placements(
        self, shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]
    ) -> tuple[Placement, ...]:
        if is_row(shape):
            return FlatBlocks(self.columns)._grid_placements(shape, placements, mesh_shape)
        grid, found = self.grid(shape), list(placements)
        for coordinate, region in products(shape, placements, mesh_shape):
            sizes = (*[1] * (len(shape) - 2), self.rows, self.columns)
            expected = [
                tuple((begin // size, -(-stop // size)) for begin, stop in ranges)
                for size, ranges in zip(sizes, region.intervals)
            ]
            cut = [Replicate() if isinstance(p, RaggedShard) else p for p in found]
            held = local_region(grid, cut, mesh_shape, coordinate)
            if region.numel and list(held.intervals) != expected:
                raise self.uneven(shape, placements, mesh_shape)
        axis = ragged_axis(placements)
        if axis is not None:
            largest = largest_shape(shape, placements, mesh_shape)
            *_, rows, columns = largest
            bands = []
            for end in run_ends(largest, placements, mesh_shape, largest):
                matrix, row = divmod(end // columns, rows)
                bands.append(matrix * -(-rows // self.rows) + -(-row // self.rows))
            found[axis] = RaggedShard(range(len(shape) - 1), counts(bands))
        try:
            return normalize_placements(found, grid, mesh_shape)
        except ValueError as error:  # shares of uneven parts
            raise self.uneven(shape, placements, mesh_shape) from error


def is_row(shape: Sequence[int]) -> bool:
    return math.prod(shape[:-1]) == 1
