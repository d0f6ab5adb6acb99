"""``shard_batch``: a global batch, which every rank has, as DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from vescale.checks import describe, step_checks
from vescale.compat import map_tensors, no_torch_function
from vescale.errors import ShardBatchError, kind_of
from vescale.ir import Wrap
from vescale.ops import wrap_global
from vescale.placements import shard_dim
from vescale.runtime._runtime import Runtime

Batch = TypeVar("Batch")
_DATA_AXES = frozenset(["batch", "data", "ddp", "dp", "dp_replicate", "dp_shard", "fsdp", "hsdp", "replicate", "shard"])


def shard_batch(batch: Batch, where: DeviceMesh | nn.Module, axes: str | Sequence[str] | None = None) -> Batch:
    """The global batch ``batch``, the same on every rank, as DTensors whose rows (dim 0) are cut over ranks.

    Each rank keeps its rows, as ``Shard(0)`` over ``axes``. The model and losses take the DTensors as they are, whether
    the plan says ``given="local"`` or not. Tensors in tuples, lists, mappings and dataclasses are cut, tensors without dims
    become Replicate, DTensors and other objects stay.

        for tokens, labels in loader:  # the global batch on every rank, from equally seeded samplers
            tokens, labels = vescale.shard_batch((tokens, labels), model)
            loss = F.cross_entropy(model(tokens), labels)

    A rank that reads only its rows from a data set is served by :class:`vescale.ShardedBatchSampler` instead.

    Args:
        where: a parallelized model, or a mesh.
        axes: of the mesh, outermost first. None: those over which the model's plan cuts rows of inputs; of a mesh, its only
            axis, or those that are called ``dp``, ``fsdp``, ``data`` and the like.

    No communication; ranks compare the batch with the model's next forward, as its inputs
    (:class:`vescale.checks.InputMismatchError`).

    Raises:
        PlanError: a model that is not parallelized.
        ValueError: axes that the mesh does not have, or no axes that are known to be the data's.
    """
    mesh, names = _mesh_and_axes(where, axes)
    known = tuple(mesh.mesh_dim_names or ())
    placements = tuple(Shard(0) if name in names else Replicate() for name in known) or (Shard(0),) * mesh.ndim

    def cut(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, DTensor):
            return x
        return wrap_global(x, mesh, placements if x.ndim else (Replicate(),) * mesh.ndim, "shard_batch")

    checks = step_checks(mesh)
    with no_torch_function():
        if checks is not None and checks.compares_data:
            for name, text in describe("batch", batch, fully=checks.is_due):
                checks.note(name, text)
        return map_tensors(cut, batch)


def _mesh_and_axes(where: DeviceMesh | nn.Module, axes: str | Sequence[str] | None) -> tuple[DeviceMesh, set[str]]:
    if isinstance(where, nn.Module):
        runtime = Runtime.of(where)
        if runtime is None:
            raise ShardBatchError(
                f"shard_batch got {kind_of(where)} that is not parallelized; expected the model after parallelize, "
                "or a mesh and its axes"
            )
        mesh = runtime.mesh
        found = {
            axis
            for instruction in runtime.program
            if instruction.path == "" and isinstance(instruction.op, Wrap)
            for axis, p in zip(runtime.axes.names, instruction.op.placements)
            if p is not None and shard_dim(p) == 0
        }
    else:
        mesh = where
        names = tuple(mesh.mesh_dim_names or ())
        found = set(names) if len(names) == 1 else set(names) & _DATA_AXES
        if axes is None and names and not found:
            raise ShardBatchError(
                f"shard_batch got a mesh with axes {names}, of which none is known to be the data's; name them: "
                f"shard_batch(batch, mesh, {names[0]!r})"
            )
    if axes is None:
        return mesh, found
    wanted = {axes} if isinstance(axes, str) else set(axes)
    if not wanted <= set(mesh.mesh_dim_names or ()):
        raise ShardBatchError(f"shard_batch got axes {sorted(wanted)}; the mesh has {mesh.mesh_dim_names}")
    return mesh, wanted
