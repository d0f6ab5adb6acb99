"""Process groups over one or several mesh axes, and the order of their ranks."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale.comm._ledger import name_group

__all__ = ["AxisGroup", "axis_group"]


@dataclass(frozen=True)
class AxisGroup:
    """The ranks that differ from this one only on some mesh axes.

    Attributes:
        group: their process group.
        coordinates: the full mesh coordinate of each, in *group rank* order (the order of collectives), which need
            not be the order of coordinates when the mesh was built from unsorted ranks.
        index: this rank's position in that order.
    """

    group: dist.ProcessGroup
    coordinates: tuple[tuple[int, ...], ...]
    index: int

    @property
    def size(self) -> int:
        return len(self.coordinates)


# Groups live as long as their mesh; meshes with the same ranks and axis names share them.
_GROUPS: weakref.WeakKeyDictionary[DeviceMesh, dict[object, AxisGroup]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def axis_group(mesh: DeviceMesh, axes: Sequence[int]) -> AxisGroup:
    """The group over ``axes`` of ``mesh`` that this rank belongs to.

    One axis is the mesh's own group. Several axes are the default group when they span the world, else a group made on
    first use (a rendezvous of its members only) and kept with the mesh.
    """
    key = (tuple(axes), dist.get_rank())  # the rank is part of the key because simulated ranks share the process
    with _LOCK:
        known = _GROUPS.setdefault(mesh, {})
        found = known.get(key)
    if found is None:
        found = _build(mesh, tuple(axes))
        with _LOCK:
            known[key] = found
    return found


def _build(mesh: DeviceMesh, axes: tuple[int, ...]) -> AxisGroup:
    own = mesh.get_coordinate()
    if own is None:
        raise ValueError(f"rank {dist.get_rank()} is not part of {mesh}")
    choices = [range(mesh.size(axis)) if axis in axes else (own[axis],) for axis in range(mesh.ndim)]
    by_rank = {int(mesh.mesh[coordinate]): coordinate for coordinate in itertools.product(*choices)}
    if len(axes) == 1:
        group = mesh.get_group(axes[0])
    elif len(by_rank) == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None  # a mesh exists, so the default group does
        group = world
    else:
        group = dist.new_group(sorted(by_rank), use_local_synchronization=True, group_desc=f"axes {axes}")
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    name_group(group, ",".join(names[axis] for axis in axes))
    order = dist.get_process_group_ranks(group)
    return AxisGroup(group, tuple(by_rank[rank] for rank in order), order.index(dist.get_rank()))
