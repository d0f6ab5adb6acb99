"""A slow model of every placement, index by index, written from the docstrings and sharing no code with the package.

A tensor of ``n`` elements is the list of its row-major indices ``0 .. n - 1``. A rank's local tensor is the list of the
indices it holds, in local order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Partial, _StridedShard

from vescale.placements import FlattenedShard, InterleavedShard, RaggedShard

__all__ = [
    "coordinates",
    "held_dims",
    "largest_dims",
    "local_indices",
    "local_shape",
    "local_tensor",
    "share_of_largest",
]


def chunks(items: list[int], count: int) -> list[list[int]]:
    """``torch.chunk``, always ``count`` lists, the last ones shorter or empty."""
    step = 0
    while step * count < len(items):
        step += 1
    return [items[index * step : (index + 1) * step] for index in range(count)]


def held_dims(
    shape: Sequence[int], placements: Sequence[Any], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> list[list[int]]:
    """For each dim the global indices that the placements other than ragged ones leave to a coordinate."""
    held = [list(range(size)) for size in shape]
    for placement, num_ranks, index in zip(placements, mesh_shape, coordinate):
        if isinstance(placement, InterleavedShard):
            num_pieces = placement.num_chunks
        elif isinstance(placement, _StridedShard):
            num_pieces = placement.split_factor
        elif isinstance(placement, Shard):
            num_pieces = 1
        elif isinstance(placement, FlattenedShard):
            middle = chunks(list(range(placement.size)), num_ranks)[index]
            here = held[placement.dim]
            held[placement.dim] = [i for i in here if i // placement.inner % placement.size in middle]
            continue
        else:
            assert isinstance(placement, Replicate | Partial | RaggedShard), placement
            continue
        mine: list[int] = []
        for piece in chunks(held[placement.dim], num_pieces):
            mine += chunks(piece, num_ranks)[index]
        held[placement.dim] = mine
    return held


def largest_dims(shape: Sequence[int], placements: Sequence[Any], mesh_shape: Sequence[int]) -> list[int]:
    """For each dim the most indices that placements other than ragged ones leave to any coordinate."""
    lengths = [list(map(len, held_dims(shape, placements, mesh_shape, c))) for c in coordinates(mesh_shape)]
    return [max(column) for column in zip(*lengths)]


def share_of_largest(
    placement: RaggedShard, largest: Sequence[int], inner_dims: Sequence[int], num_shares: int | None = None
) -> int:
    """Elements of one share of the largest local tensor, whose shape is ``largest``; 0 for an empty tensor."""
    numel = math.prod(largest)
    if numel == 0:
        return 0
    uncut = 1
    for dim in range(min(inner_dims, default=len(largest)), len(largest)):
        uncut *= largest[dim]
    if placement.block is not None:
        share = placement.block
        while share % uncut:
            share += placement.block
        return share
    num_shares = sum(placement.local_units) if num_shares is None else num_shares
    assert numel % num_shares == 0
    return numel // num_shares


def local_indices(
    shape: Sequence[int], placements: Sequence[Any], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> list[int]:
    """The row-major global indices of a coordinate's local tensor, in local order."""
    held = held_dims(shape, placements, mesh_shape, coordinate)
    everything = []  # (local index tuple, global flat index), row-major
    for local in itertools.product(*(range(len(indices)) for indices in held)):
        flat = 0
        for size, indices, position in zip(shape, held, local):
            flat = flat * size + indices[position]
        everything.append((local, flat))
    ragged = [axis for axis, placement in enumerate(placements) if isinstance(placement, RaggedShard)]
    if not ragged:
        return [flat for _, flat in everything]
    (axis,) = ragged
    placement = placements[axis]
    largest = largest_dims(shape, placements, mesh_shape)
    inner_dims = [p.dim for p in placements if getattr(p, "dim", 0) > 0]
    share = share_of_largest(placement, largest, inner_dims)
    if share == 0:
        return []
    # Shares count slices behind the first inner dim that another axis cuts, so that every coordinate of that axis cuts
    # at the same place; without such a dim they count elements.
    behind = min(inner_dims, default=len(shape))
    slices_in_share = share // math.prod(largest[behind:])
    owner_of_share = [rank for rank, units in enumerate(placement.local_units) for _ in range(units)]
    mine = []
    for local, flat in everything:
        slice_index = 0
        for dim in range(behind):
            slice_index = slice_index * len(held[dim]) + local[dim]
        if owner_of_share[slice_index // slices_in_share] == coordinate[axis]:
            mine.append(flat)
    return mine


def local_shape(
    shape: Sequence[int], placements: Sequence[Any], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[int, ...]:
    if any(isinstance(placement, RaggedShard) for placement in placements):
        return (len(local_indices(shape, placements, mesh_shape, coordinate)),)
    return tuple(len(indices) for indices in held_dims(shape, placements, mesh_shape, coordinate))


def local_tensor(
    whole: torch.Tensor, placements: Sequence[Any], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> torch.Tensor:
    """A coordinate's part of a global tensor (for Partial: of the contribution ``whole``)."""
    indices = local_indices(whole.shape, placements, mesh_shape, coordinate)
    picked = whole.reshape(-1)[torch.tensor(indices, dtype=torch.long)]
    return picked.reshape(local_shape(whole.shape, placements, mesh_shape, coordinate))


def coordinates(mesh_shape: Sequence[int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(size) for size in mesh_shape)))
