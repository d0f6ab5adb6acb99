"""Blocks of some rows and columns of each matrix."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.optim._blocks import Blocks, Cut, Part, counts, products, ragged_ends, run_ends
from vescale.optim._flat_blocks import FlatBlocks
from vescale.placements import (
    RaggedShard,
    Region,
    largest_shape,
    local_region,
    normalize_placements,
    ragged_axis,
)


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
