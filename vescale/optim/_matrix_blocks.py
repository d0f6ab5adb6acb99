"""Which parts of a parameter are matrices of their own: experts, heads, packed projections, tiles."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vescale.errors import MatrixBlocksError
from vescale.placements import Box


@dataclass(frozen=True)
class MatrixGrid:
    """A parameter cut into matrices along borders of its dims.

    Attributes:
        shape: the parameter's global shape.
        cuts: for each dim the borders of its parts, from 0 to its size. Every combination of parts, in row-major order,
            is one block; blocks are numbered in that order, whatever mesh the parameter is on.
        matrix_dim: the first dim of the matrix in a block; dims before it have size 1 there, dims from ``matrix_dim +
            1`` on are the columns.
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]
    matrix_dim: int

    @functools.cached_property
    def boxes(self) -> tuple[Box, ...]:
        """Each block of the global tensor, located in a contiguous tensor of its own sizes. Blocks without elements are left
        out."""
        parts = [list(itertools.pairwise(borders)) for borders in self.cuts]
        found = []
        for block in itertools.product(*parts):
            sizes = tuple(stop - start for start, stop in block)
            if math.prod(sizes):
                found.append(Box(tuple(start for start, _ in block), sizes, (0,) * len(sizes), None))
        return tuple(found)

    def matrix_shape(self, sizes: Sequence[int]) -> tuple[int, int]:
        """(rows, columns) of a block of these sizes."""
        return int(sizes[self.matrix_dim]), math.prod(sizes[self.matrix_dim + 1 :])


@functools.lru_cache(maxsize=4096)
def _grid(shape: tuple[int, ...], cuts: tuple[tuple[int, ...], ...], matrix_dim: int) -> MatrixGrid:
    return MatrixGrid(shape, cuts, matrix_dim)


def matrix_grid(shape: Sequence[int], blocks: Any, name: str) -> MatrixGrid:
    """The matrices of a parameter of 2 dims, or of each matrix of one of 3 dims (experts ``[E, m, n]``).

    Args:
        blocks: None: the matrix is one block. ``n``: n equal blocks along its rows. A list of row counts: unequal ones.
            ``("dim", d, n or list)``: along dim ``d`` (0 or 1) of the matrix.

    Raises:
        ValueError: another number of dims, or blocks that do not cover the dim.
    """
    shape = tuple(shape)
    if len(shape) not in (2, 3):
        raise MatrixBlocksError(
            f"parameter {name!r} has shape {shape}; expected 2 dims (a matrix) or 3 (a stack of matrices): put it "
            'into a group with algorithm="adamw"'
        )
    first = len(shape) - 2
    cuts = [tuple(range(size + 1)) if dim < first else (0, size) for dim, size in enumerate(shape)]
    if blocks is not None:
        dim, counts = _parsed(blocks, name)
        size = shape[first + dim]
        if isinstance(counts, int):
            if counts < 1 or size % counts:
                raise MatrixBlocksError(
                    f"blocks={blocks!r} of parameter {name!r}: {counts} does not divide the {size} indices of dim "
                    f"{dim} of its matrices ({shape}); pass a divisor, or a list of sizes that sum to {size}"
                )
            counts = (size // counts,) * counts
        if sum(counts) != size or any(count < 1 for count in counts):
            raise MatrixBlocksError(
                f"blocks={blocks!r} of parameter {name!r}: the sizes sum to {sum(counts)}, but dim {dim} of its "
                f"matrices has {size} indices ({shape}); pass positive sizes that sum to {size}"
            )
        cuts[first + dim] = (0, *itertools.accumulate(counts))
    return _grid(shape, tuple(cuts), first)


def _parsed(blocks: Any, name: str) -> tuple[int, int | tuple[int, ...]]:
    """(dim of the matrix, number of equal blocks or their sizes)"""
    dim, counts = 0, blocks
    if isinstance(blocks, Sequence) and len(blocks) == 3 and blocks[0] == "dim":
        dim, counts = blocks[1], blocks[2]
    is_count = isinstance(counts, int) and not isinstance(counts, bool)
    is_list = isinstance(counts, Sequence) and not isinstance(counts, str) and all(type(c) is int for c in counts)
    if dim not in (0, 1, -1, -2) or not (is_count or is_list):
        raise MatrixBlocksError(
            f"blocks={blocks!r} of parameter {name!r}; pass a number of equal blocks of rows, a list of row counts, "
            'or ("dim", d, number or list) with d = 0 or 1'
        )
    return dim % 2, counts if is_count else tuple(counts)


def tile_grid(shape: Sequence[int], blocks: Any, largest: int, name: str) -> MatrixGrid:
    """Tiles of at most ``largest`` x ``largest`` of every matrix of a parameter.

    As :func:`matrix_grid`, whose ``blocks`` are cut first. A parameter of 4 dims and more is one matrix, its dims
    behind the first being the columns; a vector is one column. Tiles start at multiples of ``largest``, also within
    each block.
    """
    shape = tuple(shape)
    if len(shape) in (2, 3):
        grid = matrix_grid(shape, blocks, name)
        cuts = [borders if dim < grid.matrix_dim else _tiled(borders, largest) for dim, borders in enumerate(grid.cuts)]
        return _grid(shape, tuple(cuts), grid.matrix_dim)
    if blocks is not None:
        raise MatrixBlocksError(
            f"blocks={blocks!r} of parameter {name!r} of shape {shape}; only matrices have blocks: leave it out"
        )
    cuts = [_tiled((0, size), largest) if dim == 0 else (0, size) for dim, size in enumerate(shape)]
    room = largest  # columns that a tile may still have
    for dim in range(1, len(shape)):
        inner = math.prod(shape[dim + 1 :])
        width = max(1, room // inner) if inner else 1
        cuts[dim] = _tiled((0, shape[dim]), width)
        if width > 1 or inner <= room:
            break
    return _grid(shape, tuple(cuts), 0)


def _tiled(borders: Sequence[int], width: int) -> tuple[int, ...]:
    return tuple(
        dict.fromkeys(b for start, stop in itertools.pairwise(borders) for b in (*range(start, stop, width), stop))
    )
