"""``join_axes``: several axes of a mesh as one axis, over all of whose ranks a tensor is sharded once."""

from __future__ import annotations

import functools
import itertools
import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale.comm._observation import name_group
from vescale.compat import exists, first_alike, make_group, mesh_over, without_modes
from vescale.errors import NotInMeshError

# Process groups over one or several mesh axes, and the order of their ranks.


@dataclass(frozen=True)
class AxisGroup:
    """The ranks that differ from this one only on some mesh axes.

    Attributes:
        group: their process group.
        coordinates: the full mesh coordinate of each, in *group rank* order (the order of collectives), which may differ
            from the order of coordinates if the mesh was built from unsorted ranks.
        index: this rank's position in that order.
        axes: names of the mesh axes, joined with ``,``.
    """

    group: dist.ProcessGroup
    coordinates: tuple[tuple[int, ...], ...]
    index: int
    axes: str = ""

    @property
    def ranks(self) -> frozenset[int]:
        """Global ranks; equal for interchangeable groups of several meshes."""
        return frozenset(dist.get_process_group_ranks(self.group))

    @property
    def size(self) -> int:
        return len(self.coordinates)


# By default group (which changes when torch.distributed is initialized again, and differs between simulated ranks), then
# by ranks. Making a group is a rendezvous, and must not depend on the garbage collector of a rank: groups are kept as long
# as the default group, not as long as a mesh.
_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[int, ...], str], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
# Equal meshes are the same key, but each has its own process groups. Which of them an op's results are on depends on what a
# rank has cached, which other ranks need not have, so that the first group serves all of them. It must not depend on the
# garbage collector either, so that groups of one axis are distinguished by name.
_AXIS_GROUPS: weakref.WeakKeyDictionary[
    dist.ProcessGroup, weakref.WeakKeyDictionary[DeviceMesh, dict[tuple[tuple[int, ...], str], AxisGroup]]
] = weakref.WeakKeyDictionary()
# Names in reports for the axes of meshes that were made by joining axes.
_LABELS: weakref.WeakKeyDictionary[DeviceMesh, tuple[str, ...]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def axis_group(mesh: DeviceMesh, axes: Sequence[int]) -> AxisGroup:
    """The group over ``axes`` of ``mesh`` that this rank belongs to.

    One axis is the group of the first mesh that has such an axis of these ranks. Several axes are the default group when
    they span the world, else a group made on first use (a rendezvous of its members only) and shared by all meshes with the
    same ranks.

    Raises ValueError on a rank outside the mesh.
    """
    axes = tuple(axes)
    own = mesh.get_coordinate()
    if own is None:
        raise NotInMeshError(
            f"rank {dist.get_rank()} requests its group on axes {axes} of {mesh}, but is not part of that mesh; call "
            "this on the mesh's ranks only"
        )
    group = mesh.get_group(axes[0]) if len(axes) == 1 else None
    key = axes, group.group_name if group is not None else ""
    with _LOCK:
        known = _AXIS_GROUPS.setdefault(_world(), weakref.WeakKeyDictionary()).setdefault(mesh, {})
        found = known.get(key)
    if found is None or not exists(found.group):
        with without_modes():  # the mesh is a tensor, and a program may be traced
            found = known[key] = _build(mesh, axes, own, group)
    # Meshes share groups (the world is one axis of a mesh and several of another): the last request names the group.
    name_group(found.group, found.axes)
    return found


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None  # a mesh exists, so the default group does
    return world


def _build(mesh: DeviceMesh, axes: tuple[int, ...], own: Sequence[int], group: dist.ProcessGroup | None) -> AxisGroup:
    choices = [range(mesh.size(axis)) if axis in axes else (own[axis],) for axis in range(mesh.ndim)]
    ranks = mesh.mesh.numpy()
    by_rank = {int(ranks[coordinate]): coordinate for coordinate in itertools.product(*choices)}
    group = first_alike(group) if group is not None else group_of_ranks(tuple(sorted(by_rank)))
    names = _LABELS.get(mesh) or mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    order = dist.get_process_group_ranks(group)
    label = ",".join(names[axis] for axis in axes)
    return AxisGroup(group, tuple(by_rank[rank] for rank in order), order.index(dist.get_rank()), label)


def label_axes(mesh: DeviceMesh, labels: Sequence[str]) -> None:
    """Names for the axes of ``mesh`` in reports, instead of their own."""
    _LABELS[mesh] = tuple(labels)


def group_of_ranks(ranks: tuple[int, ...], purpose: str = "") -> dist.ProcessGroup:
    """The group of these ranks in ascending order: one for each set of ranks and ``purpose``, made by its members on
    first use (a rendezvous) and kept as long as the default group. For all ranks and no purpose it is the default group."""
    if not purpose and len(ranks) == dist.get_world_size():
        return _world()
    with _LOCK:
        known = _GROUPS.setdefault(_world(), {})
    if (ranks, purpose) not in known:
        known[ranks, purpose] = make_group(ranks, purpose)
    return known[ranks, purpose]


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
