"""``join_axes``: several axes of a mesh as one axis, over all of whose ranks a tensor is sharded once."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale.comm._groups import axis_group, label_axes
from vescale.compat import mesh_over, without_modes

__all__ = ["join_axes"]


def join_axes(mesh: DeviceMesh, axes: Sequence[int]) -> DeviceMesh:
    """The mesh with ``axes`` joined as its last axis: ``(dp=2, ep=4, tp=2)`` and (0, 1) give ``(tp=2, dp_ep=8)``.

    Ranks on the joined axis are in row-major order of ``axes``. Its group is made on first use by its members alone (a
    rendezvous); other ranks, such as those of another pipeline stage, do not take part. On a rank outside of ``mesh`` the
    result has no groups. Equal arguments give the same object.
    """
    world = dist.group.WORLD
    assert world is not None  # the mesh exists
    return _joined(world, mesh, tuple(axes))


@functools.lru_cache(maxsize=64)  # by default group: it changes when torch.distributed is initialized anew
def _joined(world: dist.ProcessGroup, mesh: DeviceMesh, axes: tuple[int, ...]) -> DeviceMesh:
    assert axes == tuple(sorted(set(axes))), axes
    own = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    others = [axis for axis in range(mesh.ndim) if axis not in axes]
    name = "_".join(own[axis] for axis in axes)
    while name in own:
        name += "_"
    with without_modes():  # the mesh is a tensor, and a program may be traced
        sizes = [mesh.size(axis) for axis in others]
        ranks = mesh.mesh.permute(*others, *axes).reshape(*sizes, math.prod(mesh.size(axis) for axis in axes))
        groups = None
        if mesh.get_coordinate() is not None:
            groups = [mesh.get_group(axis) for axis in others] + [axis_group(mesh, axes).group]
        joined = mesh_over(mesh.device_type, ranks, [*(own[axis] for axis in others), name], groups)
    label_axes(joined, [*(own[axis] for axis in others), ",".join(own[axis] for axis in axes)])
    return joined
