"""Several axes of a mesh as one: ranks, groups and names."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.device import device_type
from tests.ranks import RankPools
from tests.runtime.zero import mesh_of
from vescale.comm import all_reduce, axis_group, join_axes, record_comms


def joined() -> None:
    mesh = mesh_of({"a": 2, "b": 2, "c": 2})
    found = join_axes(mesh, (0, 2))
    assert found.mesh_dim_names == ("b", "a_c") and tuple(found.shape) == (2, 4)
    assert found.mesh.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert found is join_axes(mesh, (0, 2))
    assert dist.get_process_group_ranks(found.get_group("a_c")) == found.mesh[mesh.get_local_rank("b")].tolist()
    assert axis_group(found, (1,)).axes == "a,c" and axis_group(found, (0, 1)).axes == "b,a,c"
    taken = join_axes(mesh_of({"a": 2, "b": 2, "a_b": 2}), (0, 1))
    assert taken.mesh_dim_names == ("a_b", "a_b_")
    with record_comms() as ledger:
        all_reduce(torch.ones(2), "sum", axis_group(found, (1,)).group).wait()
    assert [record.axes for record in ledger.records] == ["a,c"]
    part = join_axes(DeviceMesh(device_type(), [[0, 1], [2, 3]], mesh_dim_names=("x", "y")), (0, 1))
    assert part.mesh.tolist() == [0, 1, 2, 3] and (part.get_coordinate() is None) == (dist.get_rank() > 3)


def test_joined_axes(ranks: RankPools) -> None:
    ranks.run(joined, world_size=8)
