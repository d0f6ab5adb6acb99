"""Normalized placements: tensor dims counted from the front, ragged units decided and checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement

from vescale.compat import make_spec
from vescale.errors import PlacementError
from vescale.placements._placement_kinds import at_dim, contiguous_stride, ragged_axis, shard_dim, without_partials
from vescale.placements._ragged import RaggedShard, StridedRaggedShard
from vescale.placements._region import largest_shape, local_region, same_regions


def normalize_placements(
    placements: Sequence[Placement], shape: Sequence[int], mesh: DeviceMesh | Sequence[int]
) -> tuple[Placement, ...]:
    """Resolve placements for a tensor of global ``shape`` on a mesh, or on the sizes of its axes; pure, the same on every
    rank.

    Negative dims become positive; a ragged placement without units is balanced; a :class:`RaggedShard` with ``Shard(0)``
    on a later axis becomes the :class:`StridedRaggedShard` that it means.

    Args:
        placements: one for each mesh axis.
        mesh: a mesh, or the sizes of its axes.

    Raises:
        ValueError: a placement count that is not the mesh's, dims out of range, several ragged axes, units that do not
            fit the axis or cover the tensor, a wrong ``split_factor``, pending reductions whose order would matter.
    """
    mesh_shape = tuple(mesh.shape if isinstance(mesh, DeviceMesh) else mesh)
    if len(placements) != len(mesh_shape):
        raise PlacementError(
            f"{len(placements)} placements {tuple(placements)} for a mesh of {len(mesh_shape)} axes {mesh_shape}; "
            "pass one placement for each axis"
        )
    resolved = [_with_front_dim(placement, tuple(shape)) for placement in placements]
    pending = {placement.reduce_op for placement in resolved if type(placement) is Partial}
    if len(pending) > 1 and pending != {"sum", "avg"}:
        raise PlacementError(
            f"placements {tuple(placements)} mix pending reductions {sorted(pending)}, whose order would matter; use one "
            "operation (sum and avg go together), or redistribute one axis to Replicate() first"
        )
    axis = ragged_axis(resolved)
    if axis is not None:
        resolved[axis] = _resolve_ragged(resolved, axis, tuple(shape), mesh_shape)
        local_region(shape, resolved, mesh_shape, (0,) * len(mesh_shape))  # checks the units against the tensor
    return tuple(resolved)


def _with_front_dim(placement: Placement, shape: tuple[int, ...]) -> Placement:
    dim = shard_dim(placement)
    if dim is None:
        return placement
    if not -len(shape) <= dim < len(shape):
        raise PlacementError(
            f"{placement!r} names tensor dim {dim}, but the tensor has shape {shape}; use a dim in "
            f"[{-len(shape)}, {len(shape)})"
        )
    return placement if dim >= 0 else at_dim(placement, dim + len(shape))


def _resolve_ragged(
    placements: list[Placement], axis: int, shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> RaggedShard:
    placement = placements[axis]
    assert isinstance(placement, RaggedShard)
    others: list[Placement] = [p for a, p in enumerate(placements) if a != axis]
    other_sizes = tuple(n for a, n in enumerate(mesh_shape) if a != axis)
    held = largest_shape(shape, tuple(others), other_sizes)
    inner_dims = [dim for p in others if (dim := shard_dim(p)) is not None and dim > 0]
    num_pieces = 1
    for later in range(axis + 1, len(placements)):
        if shard_dim(placements[later]) == 0:
            num_pieces *= mesh_shape[later]
    if isinstance(placement, StridedRaggedShard):
        if placement.split_factor != num_pieces:
            raise PlacementError(
                f"{placement!r} on mesh axis {axis}: split_factor={placement.split_factor}, but the Shard(0) axes after "
                f"it cut dim 0 into {num_pieces} pieces ({tuple(placements)} on mesh {mesh_shape}); write "
                + (f"split_factor={num_pieces}" if num_pieces > 1 else "RaggedShard")
            )
    elif num_pieces > 1:
        placement = StridedRaggedShard(placement.dims, placement.local_units, placement.block, split_factor=num_pieces)
    return placement.resolve(held, mesh_shape[axis], inner_dims)


# Specs of contiguous DTensors, and the placements of gradients.


def resolve_gradient(
    caller: str,
    placements: Sequence[Placement],
    grad_placements: Sequence[Placement] | None,
    shape: Sequence[int],
    mesh: DeviceMesh,
) -> tuple[Placement, ...]:
    """The placements of a gradient: those given, or the tensor's own without Partial.

    Raises ValueError when they give a rank other elements than the tensor's placements do.
    """
    if grad_placements is None:
        return without_partials(placements)
    gradient = normalize_placements(grad_placements, shape, mesh)
    if not same_regions(tuple(shape), tuple(placements), gradient, tuple(mesh.shape)):
        raise PlacementError(
            f"{caller}: grad_placements {gradient} assign other elements to a rank than placements "
            f"{tuple(placements)}, but the gradient of a local tensor has its shape; keep the sharded axes as they "
            "are, and use Replicate or Partial on the others"
        )
    return gradient


def contiguous_spec(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype) -> Any:
    return make_spec(mesh, placements, shape, contiguous_stride(shape), dtype)
