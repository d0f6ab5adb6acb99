"""Random tensors, meshes and placements that fit together, from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Partial, _StridedShard

from tests.placements.oracle import largest_dims
from vescale.placements import FlattenedShard, InterleavedShard, RaggedShard, StridedRaggedShard

__all__ = ["Spec", "draw_mesh_shape", "draw_placements", "draw_ragged", "draw_shape", "draw_spec", "draw_units"]

SIZES = (0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12)
MESHES = ((1,), (2,), (3,), (4,), (8,), (2, 2), (2, 3), (4, 2), (1, 4), (2, 4), (2, 2, 2), (2, 1, 3), (1, 2, 4), (8, 1))


@dataclass(frozen=True)
class Spec:
    shape: tuple[int, ...]
    placements: tuple[Any, ...]
    mesh_shape: tuple[int, ...]


def draw_mesh_shape(rng: random.Random) -> tuple[int, ...]:
    return rng.choice(MESHES)


def draw_shape(rng: random.Random, max_numel: int = 300) -> tuple[int, ...]:
    """0 to 4 dims; empty, odd and prime sizes; at most ``max_numel`` elements."""
    while True:
        shape = tuple(rng.choice(SIZES) for _ in range(rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 4))))
        # Empty tensors are worth a few cases, not half of them.
        if math.prod(shape) <= max_numel and (0 not in shape or rng.random() < 0.15):
            return shape


def draw_units(rng: random.Random, total: int, num_ranks: int) -> tuple[int, ...]:
    """``total`` shares over the ranks: even, on one rank, or with zeros."""
    kind = rng.random()
    units = [0] * num_ranks
    if kind < 0.2:
        units[rng.randrange(num_ranks)] = total
    elif kind < 0.4:
        units = [total // num_ranks + (rank < total % num_ranks) for rank in range(num_ranks)]
    else:
        owners = [rank for rank in range(num_ranks) if rng.random() < 0.7] or [rng.randrange(num_ranks)]
        cuts = sorted(rng.randint(0, total) for _ in owners[1:])
        for owner, low, high in zip(owners, [0, *cuts], [*cuts, total]):
            units[owner] = high - low
    return tuple(units)


def draw_ragged(
    rng: random.Random, shape: Sequence[int], others: Sequence[Any], mesh_shape: Sequence[int], axis: int
) -> RaggedShard:
    """A ragged placement for ``axis`` that fits what ``others`` (Replicate on ``axis``) leave."""
    largest = largest_dims(shape, others, mesh_shape)
    inner_dims = [dim for p in others if (dim := getattr(p, "dim", 0)) > 0]
    uncut = math.prod(largest[min(inner_dims) :]) if inner_dims else 1
    numel = math.prod(largest)
    dims = tuple(range(rng.randint(0, len(shape))))
    block = None
    kind = rng.random()
    if kind < 0.15 or numel == 0:
        dims, units = dims or (0,), None  # balanced
        block = rng.choice((None, None, 1, 3))
    elif kind < 0.45:
        block = rng.choice((1, 2, 3, 4, 5, 7, 16))
        granule = math.lcm(block, uncut)
        units = draw_units(rng, -(-numel // granule), mesh_shape[axis])
    else:
        rows = math.prod(largest[: len(dims)])
        share_counts = [n for n in range(1, rows + 1) if rows % n == 0 and numel // n % uncut == 0]
        if not share_counts:  # every share of these dims would cut an inner sharded dim
            dims, share_counts = (), [1]
        units = draw_units(rng, rng.choice(share_counts[-2:] if rng.random() < 0.7 else share_counts), mesh_shape[axis])
    num_pieces = math.prod(
        mesh_shape[later] for later in range(axis + 1, len(others)) if getattr(others[later], "dim", None) == 0
    )
    if num_pieces > 1 and rng.random() < 0.5:
        return StridedRaggedShard(dims, units, block, split_factor=num_pieces)
    return RaggedShard(dims, units, block)


def draw_flattened(rng: random.Random, dim: int, length: int) -> FlattenedShard:
    """``dim`` as the flattening of three dims, any of which may have size 1."""
    inner = rng.choice([n for n in range(1, length + 1) if length % n == 0] or [1])
    size = rng.choice([n for n in range(1, length // inner + 1) if length // inner % n == 0] or [1, 3])
    return FlattenedShard(dim, size, inner)


def draw_placements(
    rng: random.Random,
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    *,
    ragged: float = 0.6,
    partial_ops: Sequence[str] = (),
) -> tuple[Any, ...]:
    """One placement for each axis; at most one ragged; all Partial axes with one of ``partial_ops``."""
    op = rng.choice(list(partial_ops)) if partial_ops else None
    placements: list[Any] = []
    for _ in mesh_shape:
        kinds = ["replicate", *(["partial"] if op else [])]
        if shape:
            kinds += ["shard", "shard", "interleaved", "strided", "flattened"]
        kind = rng.choice(kinds)
        dim = rng.randrange(len(shape)) if shape else 0
        if kind == "replicate":
            placements.append(Replicate())
        elif kind == "partial":
            placements.append(Partial(op))
        elif kind == "shard":
            placements.append(Shard(dim))
        elif kind == "flattened":
            placements.append(draw_flattened(rng, dim, shape[dim]))
        elif kind == "interleaved":
            placements.append(InterleavedShard(dim, rng.choice((1, 2, 3, 4))))
        else:
            placements.append(_StridedShard(dim, split_factor=rng.choice((2, 3))))
    if rng.random() < ragged:
        axis = rng.randrange(len(mesh_shape))
        placements[axis] = Replicate()
        placements[axis] = draw_ragged(rng, shape, placements, mesh_shape, axis)
    return tuple(placements)


def draw_spec(rng: random.Random, **options: Any) -> Spec:
    shape, mesh_shape = draw_shape(rng), draw_mesh_shape(rng)
    return Spec(shape, draw_placements(rng, shape, mesh_shape, **options), mesh_shape)
