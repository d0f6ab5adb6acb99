"""States that a matrix's owner holds whole: DTensors of which one rank has all and the others have nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from vescale.comm import join_axes
from vescale.compat import make_dtensor, make_spec
from vescale.optim._matrix_parameters import local_tensor
from vescale.optim._matrix_schedule import OwnedMatrix
from vescale.placements import RaggedShard, contiguous_stride, ragged_axis

__all__ = ["owned_values", "owner_state", "state_name"]


def state_name(name: str, matrix: OwnedMatrix, num_matrices: int) -> str:
    """``name`` of a parameter with one matrix, ``name.3`` of the matrix 3 of several: the same on every mesh."""
    return name if num_matrices == 1 else f"{name}.{matrix.block}"


def owner_state(matrix: OwnedMatrix, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros of this shape, in the memory of the matrix's owner only. Checkpoints see a whole tensor, on whatever mesh."""
    mesh = matrix.place.mesh
    if mesh is None:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    joined, placements = _placed(mesh, matrix)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    spec = make_spec(joined, placements, tuple(shape), contiguous_stride(shape), dtype)
    local_shape = tuple(shape)
    if ragged_axis(placements) is not None:  # local tensors of ragged placements are flat
        local_shape = (math.prod(shape) if matrix.is_owner(coordinate) else 0,)
    return make_dtensor(torch.zeros(local_shape, dtype=dtype, device=device), spec)


def _placed(mesh: DeviceMesh, matrix: OwnedMatrix) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """A mesh on which one axis, or several as one, tells the owner from all others."""
    axes = tuple(axis for axis in range(mesh.ndim) if axis not in matrix.repeated)
    if not axes:
        return mesh, (Replicate(),) * mesh.ndim
    index = 0
    for axis in axes:
        index = index * mesh.size(axis) + matrix.owner[axis]
    num_ranks = math.prod(mesh.size(axis) for axis in axes)
    one = RaggedShard((), tuple(int(rank == index) for rank in range(num_ranks)))
    if len(axes) == 1:
        return mesh, tuple(one if axis in axes else Replicate() for axis in range(mesh.ndim))
    return join_axes(mesh, axes), (*(Replicate(),) * (mesh.ndim - len(axes)), one)


def owned_values(state: torch.Tensor) -> torch.Tensor:
    """The values of :func:`owner_state`, on the owner, in their shape; shares their memory."""
    return local_tensor(state).view(state.shape)
