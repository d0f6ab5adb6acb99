"""Regions against the index-by-index oracle: random specs, without processes."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.placements import oracle
from tests.placements.specs import Spec, draw_ragged, draw_spec, draw_units
from vescale.placements import (
    InterleavedShard,
    RaggedShard,
    Region,
    StridedRaggedShard,
    local_region,
    normalize_placements,
)


def normalized(spec: Spec) -> tuple[Any, ...]:
    """``normalize_placements`` reads only the shape of a mesh."""
    return normalize_placements(spec.placements, spec.shape, spec.mesh_shape)


def expanded(region: Region) -> list[int]:
    return [index for start, length in region.runs() for index in range(start, start + length)]


def check_boxes(region: Region, expected: list[int]) -> None:
    """Boxes are disjoint, cover the local tensor in order, and view the right memory."""
    whole = torch.arange(math.prod(region.global_shape)).reshape(region.global_shape)
    local = torch.tensor(expected, dtype=torch.long).reshape(region.local_shape)
    first_local_index = []
    seen = 0
    positions = torch.arange(len(expected)).reshape(region.local_shape)
    for box in region.boxes:
        assert box.numel > 0
        block = whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.sizes))]
        assert torch.equal(box.view(local), block), box
        first_local_index.append(int(box.view(positions).reshape(-1)[0]))
        seen += box.numel
    assert seen == len(expected)
    covered = torch.zeros(len(expected), dtype=torch.int).reshape(region.local_shape)
    for box in region.boxes:
        box.view(covered).add_(1)
    assert bool((covered == 1).all())
    assert first_local_index == sorted(first_local_index)
    if region.flat is not None and all(len(ranges) == 1 for ranges in region.intervals):
        assert len(region.boxes) <= max(2 * len(region.shape) - 1, 1)


@pytest.mark.parametrize("seed", range(8))
def test_random_specs_match_the_oracle(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(250):
        spec = draw_spec(rng, partial_ops=("sum", "max"))
        placements = normalized(spec)
        owners: Counter[tuple[tuple[int, ...], int]] = Counter()
        unsharded = [a for a, p in enumerate(placements) if p.is_replicate() or p.is_partial()]
        for coordinate in oracle.coordinates(spec.mesh_shape):
            region = local_region(spec.shape, placements, spec.mesh_shape, coordinate)
            expected = oracle.local_indices(spec.shape, placements, spec.mesh_shape, coordinate)
            context = f"{spec} at {coordinate}"
            assert expanded(region) == expected, context
            assert region.local_shape == oracle.local_shape(spec.shape, placements, spec.mesh_shape, coordinate), (
                context
            )
            assert region.numel == len(expected), context
            check_boxes(region, expected)
            runs = list(region.runs())
            assert all(a + n != b for (a, n), (b, _) in itertools.pairwise(runs)), "runs are maximal"
            replica = tuple(coordinate[axis] for axis in unsharded)
            owners.update((replica, index) for index in expected)
        replicas = itertools.product(*(range(spec.mesh_shape[axis]) for axis in unsharded))
        everyone = Counter({(replica, index): 1 for replica in replicas for index in range(math.prod(spec.shape))})
        assert owners == everyone, f"{spec}: every element has one owner in each replica"


@pytest.mark.parametrize("seed", range(4))
def test_normalizing_twice_changes_nothing(seed: int) -> None:
    rng = random.Random(100 + seed)
    for _ in range(300):
        spec = draw_spec(rng, ragged=0.9)
        once = normalized(spec)
        assert normalized(Spec(spec.shape, once, spec.mesh_shape)) == once


@pytest.mark.parametrize("num_ranks", [64, 1024])
def test_many_ranks(num_ranks: int) -> None:
    """Pure arithmetic at the sizes of real jobs: contiguous, ordered, everything owned once."""
    rng = random.Random(num_ranks)
    shape = (num_ranks * 3 + 5, 7, 4)
    numel = math.prod(shape)
    for placement in (
        RaggedShard((0,), draw_units(rng, shape[0], num_ranks)),
        RaggedShard((0, 1, 2), draw_units(rng, numel, num_ranks)),
        RaggedShard((), tuple(int(rank == num_ranks // 2) for rank in range(num_ranks))),
        RaggedShard(block=64).resolve(shape, num_ranks),
        RaggedShard().resolve(shape, num_ranks),
    ):
        end = 0
        for rank in range(num_ranks):
            region = local_region(shape, (placement,), (num_ranks,), (rank,))
            for start, length in region.runs():
                assert start == end
                end += length
            assert len(region.boxes) <= 5
        assert end == numel


def test_many_ranks_on_three_axes() -> None:
    mesh_shape = (16, 8, 8)
    shape = (96, 40, 6)
    placements = normalize_placements((RaggedShard(), Shard(0), Shard(1)), shape, mesh_shape)
    assert isinstance(placements[0], StridedRaggedShard)
    covered = torch.zeros(shape, dtype=torch.int)
    for coordinate in oracle.coordinates(mesh_shape):
        for box in local_region(shape, placements, mesh_shape, coordinate).boxes:
            covered[tuple(slice(o, o + n) for o, n in zip(box.offset, box.sizes))] += 1
    assert bool((covered == 1).all())


@pytest.mark.parametrize("seed", range(4))
def test_every_element_is_held(seed: int) -> None:
    """Also where pieces are cut from parts of unequal length, so that the first coordinate does not hold the most."""
    rng = random.Random(seed)
    cuts = [
        Shard(0),
        Shard(0),
        InterleavedShard(0, 4),
        InterleavedShard(0, 2),
        _StridedShard(0, split_factor=3),
        Shard(1),
    ]
    for _ in range(150):
        mesh_shape = tuple(rng.choice((2, 2, 3)) for _ in range(rng.choice((2, 3, 3))))
        shape = (rng.randint(1, 30), rng.randint(1, 3))
        placements: list[Any] = [rng.choice(cuts) for _ in mesh_shape]
        axis = rng.randrange(len(mesh_shape))
        placements[axis] = Replicate()
        placements[axis] = draw_ragged(rng, shape, placements, mesh_shape, axis)
        placements = list(normalize_placements(placements, shape, mesh_shape))
        held: list[int] = []
        for coordinate in oracle.coordinates(mesh_shape):
            expected = oracle.local_indices(shape, placements, mesh_shape, coordinate)
            region = local_region(shape, placements, mesh_shape, coordinate)
            assert [i for start, length in region.runs() for i in range(start, start + length)] == expected
            held += expected
        assert sorted(held) == list(range(math.prod(shape))), (shape, placements, mesh_shape)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_stock_placements_are_stock_torch(num_ranks: int) -> None:
    """The oracle itself, where PyTorch has the same placement."""
    for size in range(18):
        whole = torch.arange(size * 2).reshape(size, 2)
        for placement in (Shard(0), _StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3)):
            shards, _ = placement._split_tensor(whole, num_ranks, with_padding=False)
            for index, shard in enumerate(shards):
                assert torch.equal(shard, oracle.local_tensor(whole, (placement,), (num_ranks,), (index,)))


def test_interleaved_splits_locally() -> None:
    """Splitting the chunks of an interleaved local tensor gives Shard(dim) parts of each chunk, with even chunks."""
    whole = torch.arange(30 * 2).reshape(30, 2)
    for num_ranks in (1, 2, 4):
        for index in range(num_ranks):
            local = oracle.local_tensor(whole, (InterleavedShard(0, 3),), (num_ranks,), (index,))
            parts = [oracle.local_tensor(c, (Shard(0),), (num_ranks,), (index,)) for c in whole.chunk(3)]
            assert torch.equal(local, torch.cat(parts))


def test_interleaved_docstring() -> None:
    whole = torch.arange(12)
    assert oracle.local_tensor(whole, (InterleavedShard(0, 3),), (2,), (0,)).tolist() == [0, 1, 4, 5, 8, 9]
    region = local_region((12,), (InterleavedShard(0, 3),), (2,), (1,))
    assert expanded(region) == [2, 3, 6, 7, 10, 11]


@pytest.mark.parametrize("shape", [(12, 5), (7,), (3, 4, 5), (2, 9), (1, 1), ()])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("block", [None, 1, 4, 7])
def test_balanced_units(shape: tuple[int, ...], num_ranks: int, block: int | None) -> None:
    """Without units: as equal as whole rows (or blocks) allow, and never a cut row."""
    decided = RaggedShard(block=block).resolve(shape, num_ranks)
    units = decided.local_units
    assert units is not None and max(units) - min(units) <= 1 and list(units) == sorted(units, reverse=True)
    granule = block if block is not None else math.prod(shape[1:])
    assert sum(units) == -(-math.prod(shape) // granule)
    for rank in range(num_ranks):
        for start, length in local_region(shape, (decided,), (num_ranks,), (rank,)).runs():
            assert start % granule == 0
            assert (start + length) % granule == 0 or start + length == math.prod(shape)


@pytest.mark.parametrize("block", [1, 2, 3, 4, 6, 10])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_blocks_never_cut_an_inner_sharded_dim(block: int, tp: int) -> None:
    shape, mesh_shape = (9, 6, 2), (4, tp)
    placements = normalize_placements((RaggedShard(block=block), Shard(1)), shape, mesh_shape)
    columns = 6 // tp * 2
    for coordinate in oracle.coordinates(mesh_shape):
        flat = local_region(shape, placements, mesh_shape, coordinate).flat
        assert flat is not None
        assert all(cut % math.lcm(block, columns) == 0 or cut == 9 * columns for cut in flat)


def test_rows_of_inner_sharded_dims_are_never_cut() -> None:
    """Uneven columns: both tp ranks cut at the same rows, whatever their own column count."""
    shape, mesh_shape = (6, 5), (3, 2)
    placements = (RaggedShard((0,), (3, 0, 3)), Shard(1))
    for dp, rows in enumerate((range(3), range(0), range(3, 6))):
        for tp, columns in enumerate((range(3), range(3, 5))):
            region = local_region(shape, placements, mesh_shape, (dp, tp))
            assert expanded(region) == [row * 5 + column for row in rows for column in columns]


def test_replicas_hold_everything() -> None:
    region = local_region((2, 3), (Replicate(), Replicate()), (2, 2), (1, 0))
    assert list(region.runs()) == [(0, 6)] and region.local_shape == (2, 3)
