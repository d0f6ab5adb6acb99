"""Mesh axes as sets of ranks: which ranks several axes, possibly of several meshes, span together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from vescale.comm import AxisGroup, axis_group
from vescale.compat import root_mesh

__all__ = ["AxisSet", "MeshUnion", "unite"]


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
