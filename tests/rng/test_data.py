"""Batches and per-sample randomness against one device's DataLoader."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader, Dataset, SequentialSampler, SubsetRandomSampler

from tests.device import device_type
from tests.ranks import RankPools
from vescale.rng import SampleSeeds, ShardedBatchSampler


class Numbers(Dataset[Tensor]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class Augmented(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        drawn = [torch.rand(()).item(), np.random.rand(), random.random()]
        return torch.tensor([float(index), *drawn], dtype=torch.float64)


def epochs(loader: Any) -> list[list[Tensor]]:
    torch.manual_seed(3)
    return [list(loader), list(loader)]


def flattened(batches: list[list[Tensor]]) -> list[Tensor]:
    return [batch for epoch in batches for batch in epoch]


def on_a_mesh(shape: tuple[int, ...], axes: Any, size: int, batch_size: int, **options: Any) -> Any:
    """(this rank's batches of two epochs, generator state, its place along ``axes``)"""
    mesh = init_device_mesh(device_type(), shape, mesh_dim_names=("dp", "cp", "tp")[: len(shape)])
    sampler = ShardedBatchSampler(Numbers(size), batch_size, mesh, axes, **options)
    batches = epochs(DataLoader(Numbers(size), batch_sampler=sampler))
    assert len(sampler) == len(batches[0])
    names = (axes,) if isinstance(axes, str) else axes
    return batches, torch.get_rng_state(), tuple(mesh.get_local_rank(name) for name in names)


@pytest.mark.parametrize(
    ("shape", "axes", "size", "batch_size", "options"),
    [
        ((4,), "dp", 39, 8, {"shuffle": True}),
        ((4,), "dp", 37, 10, {"shuffle": True, "drop_last": True}),
        ((2, 2), "dp", 30, 7, {"shuffle": True}),
        ((2, 1, 2), ("dp", "cp"), 30, 6, {"shuffle": False}),
        ((2, 2), ("dp", "cp"), 32, 8, {"shuffle": True}),
    ],
)
def test_batches_are_those_of_one_device(
    ranks: RankPools, shape: Any, axes: Any, size: int, batch_size: int, options: dict[str, bool]
) -> None:
    expected = epochs(DataLoader(Numbers(size), batch_size=batch_size, **options))
    state = torch.get_rng_state()
    assert options.get("shuffle") is False or not torch.equal(torch.cat(expected[0]), torch.cat(expected[1]))
    by_place: dict[Any, Any] = {}
    # On the CPU, where data loaders draw.
    given = shape, axes, size, batch_size
    for batches, left, place in ranks.run(on_a_mesh, *given, world_size=4, device="cpu", **options):
        assert torch.equal(left, state)
        same = by_place.setdefault(place, batches)  # ranks that differ on other axes hold the same rows
        assert all(torch.equal(a, b) for a, b in zip(*map(flattened, (same, batches)), strict=True))
    for epoch in range(2):
        parts = [by_place[place][epoch] for place in sorted(by_place)]
        together = [torch.cat(batch) for batch in zip(*parts, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(together, expected[epoch], strict=True))


def bad_samplers() -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    data = Numbers(9)
    with pytest.raises(ValueError, match="expected some of these names"):
        ShardedBatchSampler(data, 4, mesh, "tp")
    with pytest.raises(ValueError, match="leaves some ranks without rows"):
        ShardedBatchSampler(data, 1, mesh, "dp")
    with pytest.raises(ValueError, match="a global batch of 1 rows"):
        ShardedBatchSampler(data, 4, mesh, "dp")
    with pytest.raises(ValueError, match="together with the sampler"):
        ShardedBatchSampler(SequentialSampler(data), 3, mesh, "dp", shuffle=True)
    own = ShardedBatchSampler(SubsetRandomSampler(range(8)), 4, mesh, "dp")
    assert sum(len(rows) for rows in own) == 4
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="outside of the mesh"):
            ShardedBatchSampler(data, 3, DeviceMesh(device_type(), [0], mesh_dim_names=("dp",)), "dp")
    else:
        DeviceMesh(device_type(), [0], mesh_dim_names=("dp",))


def test_bad_samplers(ranks: RankPools) -> None:
    ranks.run(bad_samplers, world_size=2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_sample_seeds_do_not_depend_on_order_or_worker(num_workers: int) -> None:
    data = SampleSeeds(Augmented(12), seed=5)
    torch.manual_seed(1)
    state = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    forward = {int(row[0]): row for row in (data[i] for i in range(12))}
    assert torch.equal(state[0], torch.get_rng_state()) and (state[1] == np.random.get_state()[1]).all()
    assert state[2] == random.getstate()
    shuffled = torch.cat(list(DataLoader(data, batch_size=5, shuffle=True, num_workers=num_workers)))
    assert all(torch.equal(forward[int(row[0])], row) for row in shuffled)
    data.set_epoch(1)
    assert all(not torch.equal(forward[i][1:], data[i][1:]) for i in range(12))
    assert len({tuple(row[1:].tolist()) for row in forward.values()}) == 12
