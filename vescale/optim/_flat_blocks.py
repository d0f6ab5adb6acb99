"""Blocks of consecutive elements of the flattened tensor."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.optim._blocks import Blocks, Cut, Part, counts, products, ragged_ends, run_ends
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
