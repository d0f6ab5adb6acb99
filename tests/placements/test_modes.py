"""Slices of meshes, flattened meshes, the meta device, inference mode, and a process group that comes and goes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Partial

from tests.device import device_type
from tests.placements.on_ranks import Source, local, sample
from tests.ranks import RankPools
from tests.simulate import simulate
from vescale.placements import InterleavedShard, RaggedShard, distribute_tensor, redistribute


def parts_of_meshes() -> None:
    grid = init_device_mesh(device_type(), (2, 4), mesh_dim_names=("dp", "tp"))
    flat = grid["dp", "tp"]._flatten("all")
    whole = sample((9, 5), torch.float64, 0)
    dp, tp = grid.get_coordinate()
    for mesh, others in ((grid["tp"], dp), (grid["dp"], tp), (flat, 0)):
        shared = whole * (1 + others)  # each slice of the mesh has a tensor of its own
        placed = distribute_tensor(shared, mesh, [RaggedShard()])
        for target in (InterleavedShard(0, 2), Shard(1), RaggedShard((0, 1), (45,) + (0,) * (mesh.size() - 1))):
            moved = placed.redistribute(placements=[target])
            assert torch.equal(moved.redistribute(placements=[Replicate()]).to_local(), shared)
        tensor = Source(mesh, (9, 5), (Partial(),), torch.float64, seed=1)
        moved = redistribute(tensor.dtensor(), placements=placed.placements)
        tensor.check(local(moved), placed.placements, str(mesh))


def test_slices_and_flattened_meshes(ranks: RankPools) -> None:
    ranks.run(parts_of_meshes, world_size=8)


def without_data() -> None:
    mesh = init_device_mesh(device_type(), (4,))
    meta = distribute_tensor(torch.empty(8, 3, device="meta"), mesh, [RaggedShard((0,), (2, 0, 5, 1))])
    assert local(meta).is_meta and local(meta).numel() == (6, 0, 15, 3)[dist.get_rank()] and meta.shape == (8, 3)
    whole = sample((8, 3), torch.float32, 1)
    with torch.inference_mode():
        placed = distribute_tensor(whole, mesh, [RaggedShard()])
        moved = placed.redistribute(placements=[InterleavedShard(0, 2)])
        assert moved.is_inference() and torch.equal(moved.full_tensor(), whole)
    outside = DTensor.from_local(local(placed).clone(), mesh, placed.placements, shape=(8, 3))
    assert torch.equal(outside.full_tensor(), whole)


def test_meta_and_inference(ranks: RankPools) -> None:
    ranks.run(without_data, world_size=4)


def one_job() -> None:
    grid = init_device_mesh(device_type(), (2, 2, 2))
    whole = sample((16, 3), torch.float64, 0)
    placed = distribute_tensor(whole, grid, [RaggedShard(), Shard(0), Replicate()])
    moved = placed.redistribute(placements=[Shard(1), InterleavedShard(0, 2), Replicate()])  # a group over two axes
    assert torch.equal(moved.full_tensor(), whole)


def test_groups_do_not_outlive_their_job() -> None:
    """Equal meshes of different jobs in one process must not share process groups."""
    for _ in range(3):
        simulate(one_job, 8, timeout=60.0)
