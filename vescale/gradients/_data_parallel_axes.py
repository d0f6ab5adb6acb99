"""``DataParallelAxes``: over which mesh axes a group of parameters is sharded and replicated."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import AxisGroup, axis_group, join_axes, name_group
from vescale.compat import exists, root_mesh, without_modes
from vescale.errors import GradientReducerError
from vescale.placements import RaggedShard

_KEPT = "_kept_group"  # a step asks for the group some six times for each unit


@dataclass(frozen=True)
class DataParallelAxes:
    """Axes of ``mesh``: parameters are cut over ``shard`` and equal along ``replicate`` (HSDP).

    Axes of ``mesh`` that are neither are not data-parallel; along them every rank has parameters of its own (tensor
    parallelism). Then parameters are DTensors on ``mesh`` itself, Replicate on ``shard`` and ``replicate``.

    Where several axes of a mesh shard together, ``mesh`` has one in their place. Sharded parameters are DTensors on it,
    unsharded ones on the mesh that it was made of: ``parts``, whose axis ``a`` is axis ``part_of[a]`` of ``mesh``, or one
    of several that make it up.
    """

    mesh: DeviceMesh
    shard: int
    replicate: tuple[int, ...] = ()
    parts: DeviceMesh | None = None
    part_of: tuple[int, ...] = ()

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> DataParallelAxes:
        """A mesh of data-parallel axes only: ``(shard,)`` or ``(replicate, shard)``, as FSDP2 reads it.

        Raises ValueError for more axes, or two without names.
        """
        if mesh.ndim == 1:
            return cls(mesh, 0)
        if mesh.ndim != 2:
            raise GradientReducerError(
                f"fully_shard got a mesh of {mesh.ndim} axes {mesh.mesh_dim_names or tuple(mesh.shape)}; expected 1 (FSDP) "
                "or 2 (HSDP: replicate, then shard). Pass the data-parallel sub-mesh, mesh['dp'], or name the axes with "
                "dp_mesh_dims"
            )
        if mesh.mesh_dim_names is None:
            raise GradientReducerError(
                "fully_shard got a mesh of 2 axes without names; for HSDP pass mesh_dim_names=('replicate', 'shard') to "
                "init_device_mesh"
            )
        return cls(mesh, 1, (0,))

    @classmethod
    def of_named(cls, mesh: DeviceMesh, shard: Sequence[str], replicate: Sequence[str]) -> DataParallelAxes:
        """Named axes of a larger mesh on which the parameters are DTensors. Several shard axes become one, in the order of
        the mesh.

        Raises ValueError for names that the mesh does not have, or no shard axis.
        """
        names = mesh.mesh_dim_names or ()
        unknown = [name for name in (*shard, *replicate) if name not in names]
        if unknown or not shard:
            raise GradientReducerError(
                f"dp_mesh_dims names shard={tuple(shard)}, replicate={tuple(replicate)} for a mesh with axes {names}; name "
                "at least one axis to shard over, from those of the mesh"
            )
        if len(set(shard)) == 1:
            return cls(mesh, names.index(shard[0]), tuple(names.index(name) for name in replicate))
        others = [name for name in names if name not in shard]
        joined = join_axes(mesh, [axis for axis, name in enumerate(names) if name in shard])
        part_of = tuple(others.index(name) if name in others else len(others) for name in names)
        return cls(joined, len(others), tuple(others.index(name) for name in replicate), mesh, part_of)

    @property
    def running_mesh(self) -> DeviceMesh:
        """On which unsharded parameters are DTensors."""
        return self.parts if self.parts is not None else self.mesh

    def resting(self, axis: int) -> int:
        """The axis of ``mesh`` that an axis of :attr:`running_mesh` is, or is a part of."""
        return self.part_of[axis] if self.parts is not None else axis

    @functools.cached_property
    def running_data_parallel(self) -> tuple[int, ...]:
        """The data-parallel axes of :attr:`running_mesh`."""
        own = (self.shard, *self.replicate)
        return tuple(axis for axis in range(self.running_mesh.ndim) if self.resting(axis) in own)

    def others_at_rest(self, running: Sequence[Placement]) -> list[Placement]:
        """Placements on ``mesh`` of a tensor placed as ``running``: its cuts on the axes that are not data-parallel,
        Replicate on those that are."""
        found: list[Placement] = [Replicate() for _ in range(self.mesh.ndim)]
        for axis, placement in enumerate(running):
            if axis not in self.running_data_parallel:
                found[self.resting(axis)] = placement
        return found

    @property
    def shard_size(self) -> int:
        return self.mesh.size(self.shard)

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks along the axis that shards, as buffers communicate among them: equal meshes share one group."""
        return axis_group(self.mesh, (self.shard,)).group

    @property
    def num_replicas(self) -> int:
        size = 1
        for axis in self.replicate:
            size *= self.mesh.size(axis)
        return size

    @property
    def data_parallel(self) -> AxisGroup:
        """All ranks that take part in a group's communication."""
        kept: AxisGroup | None = self.__dict__.get(_KEPT)
        if kept is not None and exists(kept.group):
            name_group(kept.group, kept.axes)
            return kept
        found = self.__dict__[_KEPT] = axis_group(self.mesh, sorted((*self.replicate, self.shard)))
        return found

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != _KEPT}  # groups belong to a process

    @property
    def data_parallel_ranks(self) -> tuple[int, ...]:
        """The ranks of that group, which is not made for it."""
        own = self.mesh.get_coordinate()
        assert own is not None
        kept = (*self.replicate, self.shard)
        place = tuple(slice(None) if axis in kept else index for axis, index in enumerate(own))
        with without_modes():  # the mesh is a tensor, and a program may be traced
            return tuple(sorted(self.mesh.mesh[place].flatten().tolist()))

    @property
    def device(self) -> torch.device:
        """Where the group computes: the mesh's device type, the current device of it."""
        kind = self.mesh.device_type
        if kind == "cpu":
            return torch.device("cpu")
        return torch.device(kind, torch.get_device_module(kind).current_device())

    def buffer_placements(self, shard: Placement, replicate: Placement | None = None) -> list[Placement | None]:
        """Placements of a buffer with ``shard`` on the sharded axis, ``replicate`` on the replicated ones."""
        found: list[Placement | None] = [None] * self.mesh.ndim
        for axis in self.replicate:
            found[axis] = replicate or Replicate()
        found[self.shard] = shard
        return found

    def sharded(self) -> list[Placement | None]:
        return self.buffer_placements(RaggedShard())

    def gathered(self) -> list[Placement | None]:
        return self.buffer_placements(Replicate())

    def unreduced(self, op: str) -> list[Placement | None]:
        return self.buffer_placements(Partial(op), Partial(op))


# Mesh axes as sets of ranks: which ranks several axes, possibly of several meshes, span together.


@dataclass(frozen=True)
class AxisSet:
    """Axes of one mesh, in ascending order; they have one process group, which is created on first use."""

    mesh: DeviceMesh
    axes: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.mesh.size(axis) for axis in self.axes)

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes)

    @property
    def names(self) -> tuple[str, ...]:
        names = self.mesh.mesh_dim_names or tuple(map(str, range(self.mesh.ndim)))
        return tuple(names[axis] for axis in self.axes)

    def group(self) -> AxisGroup:
        return axis_group(self.mesh, self.axes)


@dataclass(frozen=True)
class MeshUnion:
    """A mesh of which two meshes are parts: one of the two, or the mesh that both were sliced from.

    ``first`` and ``second`` give, for each axis of the two meshes, the axes of ``mesh`` that span the same ranks.
    """

    mesh: DeviceMesh
    first: tuple[tuple[int, ...], ...]
    second: tuple[tuple[int, ...], ...]


def unite(first: DeviceMesh, second: DeviceMesh) -> MeshUnion | None:
    """None if no mesh is known that both are parts of: then no group over axes of both can be named."""
    for mesh in (first, second, root_mesh(first), root_mesh(second)):
        a, b = _embed(first, mesh), _embed(second, mesh)
        if a is not None and b is not None:
            return MeshUnion(mesh, a, b)
    return None


def _embed(inner: DeviceMesh, outer: DeviceMesh) -> tuple[tuple[int, ...], ...] | None:
    """For each axis of ``inner``, the axes of ``outer`` that span the same ranks; None if there are none."""
    if inner == outer:
        return tuple((axis,) for axis in range(inner.ndim))
    own = outer.get_coordinate()
    if own is None:
        return None
    found = [_axes_of(_block(inner, (axis,)), outer) for axis in range(inner.ndim)]
    if any(axes is None for axes in found):
        return None
    axes = tuple(axes for axes in found if axes is not None)
    together = tuple(sorted({axis for some in axes for axis in some}))
    whole = _block(inner, range(inner.ndim)) == _block(outer, together)
    return axes if whole and len(together) == sum(map(len, axes)) else None


def _axes_of(ranks: frozenset[int], mesh: DeviceMesh) -> tuple[int, ...] | None:
    places = [(mesh.mesh == rank).nonzero() for rank in ranks]
    if any(len(place) != 1 for place in places):
        return None
    coordinates = torch.cat(places)
    axes = tuple(axis for axis in range(mesh.ndim) if len(coordinates[:, axis].unique()) > 1)
    return axes if _block(mesh, axes) == ranks else None


def _block(mesh: DeviceMesh, axes: Sequence[int]) -> frozenset[int]:
    """The ranks whose coordinates differ from this rank's only on ``axes``."""
    own = mesh.get_coordinate()
    assert own is not None
    index = tuple(slice(None) if axis in axes else own[axis] for axis in range(mesh.ndim))
    return frozenset(mesh.mesh[index].flatten().tolist())
