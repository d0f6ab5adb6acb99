"""Meshes made of meshes."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["concatenate_meshes", "mesh_over"]


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """The mesh with the axes of sub-meshes of one root mesh, in this order. No communication.

    Raises ValueError for meshes that are not sub-meshes of one root.
    """
    world = dist.group.WORLD
    assert world is not None  # meshes exist
    return _joined(world, tuple(meshes))


@functools.lru_cache(maxsize=64)  # by default group: it changes when torch.distributed is initialized anew
def _joined(world: dist.ProcessGroup, meshes: tuple[DeviceMesh, ...]) -> DeviceMesh:
    try:
        return DeviceMesh._concatenate(list(meshes))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ValueError(
            f"meshes {[mesh.mesh_dim_names or str(mesh) for mesh in meshes]} cannot be joined ({error}); take them "
            "as sub-meshes of one mesh: mesh = init_device_mesh(..., mesh_dim_names=('dp', 'tp')), then mesh['dp'] and "
            "mesh['tp']"
        ) from error


def mesh_over(
    device_type: str, ranks: torch.Tensor, names: Sequence[str], groups: Sequence[dist.ProcessGroup] | None
) -> DeviceMesh:
    """A mesh of ``ranks`` whose axes have these process groups; None on a rank that is not one of them. No communication."""
    if groups is not None:
        return DeviceMesh.from_group(list(groups), device_type, ranks, mesh_dim_names=tuple(names))
    return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(names), _init_backend=False)
