"""Every pair of placements on gloo ranks, against the oracle's local tensors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Partial, _StridedShard

from tests.placements.on_ranks import Source, local, make_mesh
from tests.placements.specs import draw_placements, draw_shape, draw_units
from tests.ranks import RankPools, run_cases
from vescale.placements import (
    InterleavedShard,
    RaggedShard,
    has_custom,
    normalize_placements,
    redistribute,
)
from vescale.placements._move import move_local

WORLDS = [1, 2, 3, 4, 8]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def dtype_for(index: int, placements: tuple[Any, ...]) -> torch.dtype:
    """Every dtype in turn; where a reduction has no meaning for it, float64."""
    dtype = DTYPES[index % len(DTYPES)]
    for placement in placements:
        if not placement.is_partial():
            continue
        if placement.is_partial("avg") and dtype in (torch.int64, torch.bool):
            return torch.float64
        if (dtype.is_complex and not placement.is_partial("sum")) or (dtype == torch.bool):
            return torch.float64
    return dtype


def move_and_compare(
    mesh_ranks: Any, shape: tuple[int, ...], source: tuple[Any, ...], target: tuple[Any, ...], index: int
) -> None:
    mesh = make_mesh(mesh_ranks)
    dtype = dtype_for(index, (*source, *target))
    source, target = normalize_placements(source, shape, mesh), normalize_placements(target, shape, mesh)
    tensor = Source(mesh, shape, source, dtype, seed=index)
    context = f"{dtype} {shape} {source} -> {target} on {tuple(mesh.shape)}"
    if not has_custom((*source, *target)):  # stock DTensor's business, but our exchange must be right there, too
        tensor.check(move_local(tensor.local, mesh, shape, source, target).wait(), target, context)
        return
    before = tensor.dtensor()
    after = redistribute(before, placements=target)
    assert type(after) is DTensor and after.placements == target and after.shape == torch.Size(shape)
    tensor.check(local(after), target, context)
    assert torch.equal(local(before), tensor.local), f"{context}: the source changed"
    back = tuple(Replicate() if placement.is_partial() else placement for placement in source)
    if has_custom((*target, *back)):
        tensor.check(local(redistribute(after, placements=back)), back, f"{context} and back")


def all_forms(num_ranks: int, shape: tuple[int, ...], seed: int) -> list[Any]:
    rng = random.Random(seed)
    numel = torch.Size(shape).numel()
    whole_on_one = tuple(int(rank == num_ranks - 1) for rank in range(num_ranks))
    return [
        RaggedShard((0, 1), draw_units(rng, numel, num_ranks)),  # element-wise
        RaggedShard((0,), draw_units(rng, shape[0], num_ranks)),  # row-wise
        RaggedShard((0,), draw_units(rng, 1, num_ranks)),
        RaggedShard((0, 1), draw_units(rng, -(-numel // 4), num_ranks), block=4),
        RaggedShard((), whole_on_one),
        RaggedShard(),
        InterleavedShard(0, 3),
        InterleavedShard(1, 2),
        Shard(0),
        Shard(1),
        _StridedShard(0, split_factor=2),
        Replicate(),
        Partial("sum"),
        Partial("avg"),
        Partial("max"),
        Partial("min"),
    ]


def one_axis_pairs(world_size: int, shape: tuple[int, ...]) -> int:
    forms = all_forms(world_size, shape, seed=world_size)
    ranks = tuple(range(world_size))
    pairs = [(s, t) for s in forms for t in forms if s == t or not (s.is_partial() and t.is_partial())]
    return run_cases(move_and_compare, [(ranks, shape, (s,), (t,), n) for n, (s, t) in enumerate(pairs)])


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("shape", [(7, 6), (8, 4), (2, 3)])
def test_every_pair_on_one_axis(ranks: RankPools, world_size: int, shape: tuple[int, ...]) -> None:
    counts = ranks.run(one_axis_pairs, world_size, shape, world_size=world_size)
    assert counts[0] == 16 * 16 - 4 * 3


def random_pairs(mesh_ranks: Any, seed: int, count: int) -> int:
    rng = random.Random(seed)
    mesh_shape = tuple(torch.tensor(mesh_ranks).shape)
    cases = []
    for index in range(count):
        shape = draw_shape(rng)
        op = rng.choice(("sum", "avg", "max", "min"))
        source = draw_placements(rng, shape, mesh_shape, partial_ops=(op,) if rng.random() < 0.5 else ())
        target = draw_placements(rng, shape, mesh_shape, partial_ops=(op,) if rng.random() < 0.2 else ())
        cases.append((mesh_ranks, shape, source, target, index))
    return run_cases(move_and_compare, cases)


@pytest.mark.parametrize(
    "mesh_ranks",
    [
        (0, 1, 2),
        (2, 0, 1),
        ((0, 1), (2, 3)),
        ((3, 1), (2, 0)),
        ((0, 1, 2, 3), (4, 5, 6, 7)),
        ((7, 2), (0, 5), (1, 6), (3, 4)),
        (((0, 1), (2, 3)), ((4, 5), (6, 7))),
        (((5, 0), (7, 2)), ((1, 4), (3, 6))),
        (((0,), (1,)), ((2,), (3,))),
    ],
    ids=str,
)
def test_random_pairs(ranks: RankPools, mesh_ranks: Any) -> None:
    world_size = torch.tensor(mesh_ranks).numel()
    ranks.run(random_pairs, mesh_ranks, 7, 120, world_size=world_size)
