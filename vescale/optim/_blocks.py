"""Blocks of a global tensor that are quantized together, and the part of them that each rank holds.

Borders of blocks are those of the global tensor. A rank must hold its blocks whole, so that it needs no other rank for them;
in its local tensor, blocks then follow each other in the same order, and start anew at the same places.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.errors import UnevenBlocksError
from vescale.placements import RaggedShard, Region, coordinates, largest_shape, local_region, ragged_axis, shard_dim


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
