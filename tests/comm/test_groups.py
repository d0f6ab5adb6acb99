"""Groups over mesh axes: the order of their ranks, how long they live, and who must take part in making them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.device import device_type
from tests.placements.on_ranks import make_mesh
from tests.ranks import RankPools
from vescale.comm import axis_group


def check_order(mesh_ranks: Any, axes: tuple[int, ...]) -> None:
    mesh = make_mesh(mesh_ranks)
    found = axis_group(mesh, axes)
    own = mesh.get_coordinate()
    assert own is not None
    ranks = dist.get_process_group_ranks(found.group)
    assert ranks[found.index] == dist.get_rank() and found.size == len(ranks)
    assert found.coordinates[found.index] == tuple(own)
    for rank, coordinate in zip(ranks, found.coordinates):
        assert int(mesh.mesh[coordinate]) == rank
        assert all(coordinate[axis] == own[axis] for axis in range(mesh.ndim) if axis not in axes)
    assert axis_group(mesh, axes) is found
    total = torch.ones(1)
    dist.all_reduce(total, group=found.group)
    assert total.item() == found.size


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("mesh_ranks", [(((0, 1), (2, 3)), ((4, 5), (6, 7))), (((5, 0), (7, 2)), ((1, 4), (3, 6)))])
def test_coordinates_follow_group_ranks(ranks: RankPools, mesh_ranks: Any, axes: tuple[int, ...]) -> None:
    ranks.run(check_order, mesh_ranks, axes, world_size=8)


def uneven_histories() -> None:
    """Ranks that know different numbers of groups still find each other."""
    make_mesh((0, 1, 2))  # three ranks know a group that the others do not
    check_order((((0, 4), (3, 5)), ((1, 6), (7, 2))), (0, 1))  # ranks that no other test groups


def test_ranks_with_other_groups_of_their_own(ranks: RankPools) -> None:
    ranks.run(uneven_histories, world_size=8)


def equal_meshes() -> None:
    """Whether a mesh has been collected on one rank only must not decide who makes a group."""
    nested = torch.tensor([[[0, 2], [1, 3]], [[4, 6], [5, 7]]])
    first = DeviceMesh(device_type(), nested)
    group = axis_group(first, (0, 1)).group
    if dist.get_rank() % 2:
        del first
        gc.collect()
    second = DeviceMesh(device_type(), nested, mesh_dim_names=("a", "b", "c"))
    assert axis_group(second, (0, 1)).group is group


def test_groups_outlive_their_mesh(ranks: RankPools) -> None:
    ranks.run(equal_meshes, world_size=8)


def one_axis_of_equal_meshes() -> None:
    """What a rank has cached of one mesh serves the equal ones, and other ranks may have cached something else: all of them
    communicate in the groups of the first, whether it is still there or not."""
    names = ("of equal meshes", "another")
    first = DeviceMesh(device_type(), [[0, 1], [2, 3]], mesh_dim_names=names)
    held = first.get_group(0)
    second = DeviceMesh(device_type(), [[0, 1], [2, 3]], mesh_dim_names=names)
    assert second == first and second.get_group(0) is not held
    if dist.get_rank() % 2:
        del first
        gc.collect()
    found = axis_group(second, (0,))
    assert found.group is held and axis_group(second, (0,)) is found
    total = torch.ones(1)
    dist.all_reduce(total, group=found.group)
    assert total.item() == 2
    dist.destroy_process_group(held)
    assert axis_group(second, (0,)).group is second.get_group(0)


def test_equal_meshes_communicate_in_the_same_groups(ranks: RankPools) -> None:
    ranks.run(one_axis_of_equal_meshes, world_size=4)


def timeouts() -> None:
    """A member that never comes is an error as soon as in the default group, not after half an hour."""
    mesh = make_mesh((((0, 1), (2, 3)),))
    assert dist.get_process_group_ranks(axis_group(mesh, (1, 2)).group) == [0, 1, 2, 3]
    small = axis_group(make_mesh((((0, 1),), ((2, 3),))), (1, 2)).group
    (world_timeout, own_timeout) = (
        group._get_backend(torch.device("cpu")).options._timeout for group in (dist.group.WORLD, small)
    )
    assert own_timeout == world_timeout and own_timeout.total_seconds() < 1800


def test_timeout_of_made_groups(ranks: RankPools) -> None:
    ranks.run(timeouts, world_size=4)


def outside() -> None:
    mesh = make_mesh((0, 1))
    if dist.get_rank() > 1:
        with pytest.raises(ValueError, match=r"rank [23] requests .* is not part of that mesh"):
            axis_group(mesh, (0,))
    else:
        assert axis_group(mesh, (0,)).size == 2


def test_ranks_outside_the_mesh(ranks: RankPools) -> None:
    ranks.run(outside, world_size=4)
