"""``distribute_tensor``, ``from_local``, ``to_local`` and ``redistribute`` for every placement, differentiable.

With stock placements only, these do what their stock namesakes do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import as_async_tensor, local_of, make_dtensor, make_spec, rank_in_mesh, spec_of, stock
from vescale.placements._kinds import has_custom, ragged_axis
from vescale.placements._move import move_local
from vescale.placements._normalize import normalize_placements
from vescale.placements._ragged import RaggedShard
from vescale.placements._region import local_region

__all__ = ["distribute_tensor", "from_local", "redistribute", "redistribute_local", "to_local"]


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Distribute a global tensor, as ``torch.distributed.tensor.distribute_tensor`` does, to any placements.

    Args:
        tensor: the global tensor, of the same shape on every rank; a leaf.
        placements: one for each mesh axis; None: Replicate. Partial is refused, as in stock DTensor.
        src_data_rank: coordinate on each axis whose values count (one broadcast an axis); None: every rank's own
            values are used and nothing is communicated.

    Raises:
        ValueError: placements that do not fit the tensor or the mesh, on every rank before any communication.
    """
    placements = list(placements) if placements is not None else [Replicate()] * device_mesh.ndim
    if not has_custom(placements):
        return stock().distribute_tensor(tensor, device_mesh, placements, src_data_rank=src_data_rank)
    if not tensor.is_leaf:
        raise RuntimeError(
            "distribute_tensor takes a leaf tensor; the one given has a gradient history: use from_local, or detach it"
        )
    wanted = normalize_placements(placements, tensor.shape, device_mesh)
    if any(placement.is_partial() for placement in wanted):
        raise ValueError(f"distribute_tensor cannot place as {wanted}: Partial has no source; use from_local")
    replicated = [Replicate()] * device_mesh.ndim
    whole = stock().distribute_tensor(tensor.detach(), device_mesh, replicated, src_data_rank=src_data_rank)
    spec = _contiguous_spec(device_mesh, wanted, tensor.shape, tensor.dtype)
    if not rank_in_mesh(device_mesh):
        return make_dtensor(tensor.new_empty(0), spec, requires_grad=tensor.requires_grad)
    local = move_local(local_of(whole), device_mesh, tensor.shape, replicated, wanted).wait()
    return make_dtensor(local, spec, requires_grad=tensor.requires_grad)


def redistribute(
    dtensor: DTensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> DTensor:
    """Change a DTensor's placements; differentiable, also twice.

    Any of Ragged, StridedRagged, Interleaved, Shard, Replicate and Partial (sum, avg, max, min) to any other, except one
    pending reduction to another. Communication: see ``vescale/placements/_move.py``.

    Args:
        placements: one for each mesh axis.
        async_op: return before the last collective has finished; the local tensor waits on first use.
        forward_dtype: cast to this dtype before communicating; the result has it. None: keep.
        backward_dtype: communicate gradients in this dtype; they then get the input's. None: the input's.

    Raises:
        NotImplementedError: another mesh than the tensor's.
        ValueError: placements that do not fit, on every rank before any communication.
    """
    mesh = spec_of(dtensor).mesh
    if placements is None:
        raise RuntimeError("redistribute needs placements: one for each mesh axis")
    if not has_custom([*placements, *dtensor.placements]) and not any(p.is_partial() for p in placements):
        return stock().redistribute(
            dtensor,
            device_mesh,
            placements,
            async_op=async_op,
            forward_dtype=forward_dtype,
            backward_dtype=backward_dtype,
        )
    if device_mesh is not None and device_mesh != mesh:
        raise NotImplementedError(
            f"redistribute from mesh {mesh} to mesh {device_mesh}: both must be the same; go through full_tensor()"
        )
    wanted = normalize_placements(placements, dtensor.shape, mesh)
    return _Redistribute.apply(dtensor, wanted, async_op, forward_dtype, backward_dtype)


class _Redistribute(torch.autograd.Function):
    """Forward: any placements to any. Backward: the gradient goes back to the input's placements, Replicate for Partial
    (every rank's contribution has the whole gradient)."""

    @staticmethod
    def forward(
        ctx: Any,
        dtensor: DTensor,
        placements: tuple[Placement, ...],
        async_op: bool,
        forward_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
    ) -> DTensor:
        local, spec = local_of(dtensor), spec_of(dtensor)
        ctx.placements, ctx.dtype, ctx.async_op, ctx.backward_dtype = (
            spec.placements,
            local.dtype,
            async_op,
            backward_dtype or local.dtype,
        )
        if forward_dtype is not None:
            local = local.to(forward_dtype)
        pending = move_local(local, spec.mesh, dtensor.shape, spec.placements, placements)
        if spec.placements == placements:
            moved = local.view_as(local)
        else:
            moved = as_async_tensor(pending.out, pending) if async_op else pending.wait()
        result = _contiguous_spec(spec.mesh, placements, dtensor.shape, moved.dtype)
        return make_dtensor(moved, result, requires_grad=dtensor.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor | None, ...]:
        target = _gradient_placements(ctx.placements)
        moved = _Redistribute.apply(grad, target, ctx.async_op, ctx.backward_dtype, None)
        if moved.dtype != ctx.dtype:
            moved = moved.to(ctx.dtype)
        return moved, None, None, None, None


def redistribute_local(local: torch.Tensor, current: Any, target: Any, *, async_op: bool = False) -> torch.Tensor:
    """``redistribute`` on local tensors and specs, outside autograd: what the op dispatcher calls."""
    pending = move_local(local, current.mesh, current.shape, current.placements, target.placements)
    return as_async_tensor(pending.out, pending) if async_op and pending.out is not local else pending.wait()


def to_local(dtensor: DTensor, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
    """This rank's part; differentiable. A ragged DTensor's local tensor is flat.

    ``grad_placements`` says how the gradient of the returned tensor lies; None: as the DTensor, Replicate for Partial.
    No communication.
    """
    if not has_custom([*dtensor.placements, *(grad_placements or ())]):
        return stock().to_local(dtensor, grad_placements=grad_placements)
    if not torch.is_grad_enabled():
        return local_of(dtensor)
    placements = grad_placements if grad_placements is not None else _gradient_placements(dtensor.placements)
    resolved = normalize_placements(placements, dtensor.shape, spec_of(dtensor).mesh)
    return _ToLocal.apply(dtensor, resolved)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, grad_placements: tuple[Placement, ...]) -> torch.Tensor:
        ctx.mesh, ctx.shape, ctx.grad_placements = spec_of(dtensor).mesh, dtensor.shape, grad_placements
        ctx.set_materialize_grads(False)
        local = local_of(dtensor)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[DTensor | None, None]:
        if grad is None:
            return None, None
        return from_local(grad, ctx.mesh, ctx.grad_placements, shape=ctx.shape), None


def from_local(
    local_tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    run_check: bool = False,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    grad_placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor around each rank's part; differentiable, no communication.

    Args:
        shape: the global shape; needed for ragged placements, whose local tensors do not tell it.
        grad_placements: the placements that the gradient is brought to; None: ``placements``, Replicate for Partial.

    Raises:
        ValueError: no ``shape`` for a ragged placement; a local tensor of another size than the placements give this
            rank.
    """
    placements = list(placements) if placements is not None else None
    if not has_custom([*(placements or ()), *(grad_placements or ())]):
        return stock().from_local(
            local_tensor,
            device_mesh,
            placements,
            run_check=run_check,
            shape=shape,
            stride=stride,
            grad_placements=grad_placements,
        )
    assert placements is not None or grad_placements is not None
    if device_mesh is None:
        raise ValueError("from_local with vescale placements needs device_mesh")
    placements = placements if placements is not None else [Replicate()] * device_mesh.ndim
    if shape is None:
        shape = _shape_from_local(local_tensor, device_mesh, placements)
    resolved = normalize_placements(placements, shape, device_mesh)
    if grad_placements is None:
        gradient = _gradient_placements(resolved)
    else:
        gradient = normalize_placements(grad_placements, shape, device_mesh)
    return _FromLocal.apply(local_tensor, device_mesh, resolved, tuple(shape), gradient)


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        shape: tuple[int, ...],
        grad_placements: tuple[Placement, ...],
    ) -> DTensor:
        ctx.grad_placements, ctx.local_shape = grad_placements, local.shape
        ctx.set_materialize_grads(False)
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            local = local.new_empty(0)
        else:
            expected = local_region(shape, placements, tuple(mesh.shape), coordinate).local_shape
            if local.shape != expected and (ragged_axis(placements) is None or local.numel() != expected[0]):
                raise ValueError(
                    f"from_local: a tensor of global shape {tuple(shape)} with placements {placements} has a local "
                    f"tensor of shape {expected} at mesh coordinate {tuple(coordinate)}, but the one given has shape "
                    f"{tuple(local.shape)}; pass this rank's part, or the right shape="
                )
            local = local.reshape(expected)
        view = local.view_as(local)
        return make_dtensor(
            view, _contiguous_spec(mesh, placements, shape, local.dtype), requires_grad=local.requires_grad
        )

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return None, None, None, None, None
        moved = redistribute(grad, None, ctx.grad_placements)
        local = to_local(moved, grad_placements=ctx.grad_placements)
        return (
            local.reshape(ctx.local_shape) if local.numel() else local.new_empty(ctx.local_shape),
            None,
            None,
            None,
            None,
        )


def _gradient_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


def _contiguous_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype
) -> Any:
    stride = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        stride[dim] = stride[dim + 1] * max(shape[dim + 1], 1)
    return make_spec(mesh, placements, shape, stride, dtype)


def _shape_from_local(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> list[int]:
    """The global shape when every rank's part has the same shape, as stock ``from_local`` assumes."""
    from vescale.placements._kinds import shard_dim

    if any(isinstance(placement, RaggedShard) for placement in placements):
        raise ValueError(
            f"from_local with placements {tuple(placements)}: the flat local tensor of a ragged placement does not tell "
            "the global shape; pass shape="
        )
    shape = list(local.shape)
    for axis, placement in enumerate(placements):
        dim = shard_dim(placement)
        if dim is not None:
            shape[dim] *= mesh.size(axis)
    return shape
