"""Meshes made of meshes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.device_mesh import DeviceMesh

from vescale.errors import PlacementError

if TYPE_CHECKING or hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
    from torch.distributed.fsdp import DataParallelMeshDims
else:  # before 2.12

    @dataclass
    class DataParallelMeshDims:
        """Names of the axes that ``fully_shard`` shards and replicates over, as newer PyTorch's class of this name."""

        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None

        def __post_init__(self) -> None:
            if self.shard is None and self.replicate is None:
                raise PlacementError(
                    "DataParallelMeshDims got neither shard nor replicate; pass an axis of the mesh, shard='dp'"
                )

        @property
        def shard_names(self) -> tuple[str, ...]:
            return _names(self.shard)

        @property
        def replicate_names(self) -> tuple[str, ...]:
            return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)


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
        raise PlacementError(
            f"meshes {[mesh.mesh_dim_names or str(mesh) for mesh in meshes]} cannot be joined ({error}); slice both "
            "from one mesh: mesh = init_device_mesh(..., mesh_dim_names=('dp', 'tp')), then mesh['dp'] and mesh['tp']"
        ) from error


def mesh_over(
    device_type: str, ranks: torch.Tensor, names: Sequence[str], groups: Sequence[dist.ProcessGroup] | None
) -> DeviceMesh:
    """A mesh of ``ranks`` whose axes have these process groups; None on a rank that is not one of them. No communication."""
    if groups is not None:
        return DeviceMesh.from_group(list(groups), device_type, ranks, mesh_dim_names=tuple(names))
    return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(names), _init_backend=False)
