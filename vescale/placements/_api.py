"""``distribute_tensor``, ``redistribute`` and ``full_tensor`` for every placement, differentiable.

With stock placements only, these do what their stock namesakes do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import (
    AsyncCollectiveTensor,
    as_async_tensor,
    current_mesh,
    local_of,
    make_dtensor,
    make_spec,
    rank_in_mesh,
    spec_of,
    stock,
)
from vescale.placements._kinds import has_custom
from vescale.placements._move import move_local
from vescale.placements._normalize import normalize_placements
from vescale.placements._ragged import RaggedShard
from vescale.placements._specs import contiguous_spec, gradient_placements, resolve_gradient, row_major

__all__ = [
    "Redistribute",
    "distribute_tensor",
    "full_tensor",
    "redistribute",
    "redistribute_local",
]


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Distribute a global tensor, as ``torch.distributed.tensor.distribute_tensor`` does, to any placements.

    Args:
        tensor: the global tensor, of the same shape on every rank; a leaf.
        device_mesh: None: the mesh of the surrounding ``with mesh:``.
        placements: one for each mesh axis; None: Replicate. Partial is refused: it has no source.
        src_data_rank: coordinate on each axis whose values count: one exchange an axis, in which the source sends every
            rank its part (a broadcast for Replicate); None: every rank's own values are used and nothing is
            communicated.

    Raises:
        ValueError: placements that do not fit the tensor or the mesh, on every rank before any communication.
        RuntimeError: a tensor that is not a leaf.
    """
    placements = list(placements) if placements is not None else None
    if placements is None or not has_custom(placements):
        return stock().distribute_tensor(tensor, device_mesh, placements, src_data_rank=src_data_rank)
    device_mesh = device_mesh or current_mesh()
    if not tensor.is_leaf:
        raise RuntimeError(
            "distribute_tensor takes a leaf tensor; the one given has a gradient history: use from_local, or detach it"
        )
    wanted = normalize_placements(placements, tensor.shape, device_mesh)
    if isinstance(tensor, DTensor):
        if tensor.device_mesh == device_mesh and tensor.placements == wanted:
            return tensor
        raise ValueError(
            f"distribute_tensor got a DTensor with placements {tensor.placements} for {wanted}; call redistribute"
        )
    if any(placement.is_partial() for placement in wanted):
        raise ValueError(f"distribute_tensor cannot place as {wanted}: Partial has no source; use from_local")
    spec = contiguous_spec(device_mesh, wanted, tensor.shape, tensor.dtype)
    local = tensor.detach()
    if device_mesh.device_type != local.device.type and not local.is_meta:
        local = local.to(device_mesh.device_type)
    if not rank_in_mesh(device_mesh):
        local = local.new_empty(0)
    elif src_data_rank is None or local.is_meta:
        replicated = [Replicate()] * device_mesh.ndim
        local = move_local(local, device_mesh, tensor.shape, replicated, wanted).wait()
    else:
        local = _scatter(local, device_mesh, wanted, src_data_rank)
    if local.untyped_storage()._cdata == tensor.untyped_storage()._cdata:  # nothing had to be moved or cut
        local = local.clone()
    return make_dtensor(local, spec, requires_grad=tensor.requires_grad)


def _scatter(whole: torch.Tensor, mesh: DeviceMesh, wanted: Sequence[Placement], source_rank: int) -> torch.Tensor:
    """Axis by axis, the rank at coordinate ``source_rank`` sends the others their parts of what it holds.

    On each axis in turn the tensor is ragged with everything on the source; a ragged axis is last because its cut is.
    """
    axes = sorted(range(mesh.ndim), key=lambda axis: isinstance(wanted[axis], RaggedShard))
    placements: list[Placement] = [Replicate()] * mesh.ndim
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = whole
    for axis in axes:
        owner = [int(rank == source_rank) for rank in range(mesh.size(axis))]
        before, after = list(placements), list(placements)
        before[axis], after[axis] = RaggedShard((), owner), wanted[axis]
        local = local.reshape(-1) if coordinate[axis] == source_rank else local.new_empty(0)
        local = move_local(local, mesh, whole.shape, before, after).wait()
        placements = after
    return local


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
        async_op: return before the last collective has finished; the local tensor waits on first use. The backward
            redistribution is asynchronous then, too.
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
    own = dtensor.dtype
    return Redistribute.apply(
        dtensor, wanted, async_op, forward_dtype or own, forward_dtype or own, backward_dtype or own
    )


class Redistribute(torch.autograd.Function):
    """Forward: any placements to any. Backward: the gradient goes back to the input's placements, Replicate for Partial
    (every rank's contribution has the whole gradient)."""

    @staticmethod
    def forward(
        ctx: Any,
        dtensor: DTensor,
        placements: tuple[Placement, ...],
        async_op: bool,
        moved_dtype: torch.dtype,
        result_dtype: torch.dtype,
        backward_dtype: torch.dtype,
    ) -> DTensor:
        local, spec = local_of(dtensor), spec_of(dtensor)
        ctx.placements, ctx.dtype = spec.placements, local.dtype
        ctx.async_op, ctx.backward_dtype = async_op, backward_dtype
        if local.dtype != moved_dtype:
            local = local.to(moved_dtype)
        if spec.placements == placements:
            moved = local.view_as(local)
            stride = dtensor.stride()
        else:
            pending = move_local(local, spec.mesh, dtensor.shape, spec.placements, placements)
            moved = as_async_tensor(pending.out, pending) if async_op else pending.wait()
            stride = row_major(dtensor.shape)
        if moved.dtype != result_dtype:
            moved = moved.to(result_dtype)
        result = make_spec(spec.mesh, placements, dtensor.shape, stride, moved.dtype)
        return make_dtensor(moved, result, requires_grad=dtensor.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor | None, ...]:
        target = gradient_placements(ctx.placements)
        moved = Redistribute.apply(grad, target, ctx.async_op, ctx.backward_dtype, ctx.dtype, grad.dtype)
        return moved, None, None, None, None, None


def redistribute_local(local: torch.Tensor, current: Any, target: Any, *, async_op: bool = False) -> torch.Tensor:
    """``redistribute`` on local tensors and specs, outside autograd: what the op dispatcher calls."""
    pending = move_local(local, current.mesh, current.shape, current.placements, target.placements)
    return as_async_tensor(pending.out, pending) if async_op and pending.out is not local else pending.wait()


def full_tensor(dtensor: DTensor, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
    """The global tensor on every rank; differentiable. Communicates as ``redistribute`` to Replicate does.

    ``grad_placements`` says how the gradient of the returned tensor lies, Replicate or Partial; None: Replicate.
    """
    replicated = [Replicate()] * dtensor.device_mesh.ndim
    gradient = resolve_gradient("full_tensor", replicated, grad_placements, dtensor.shape, dtensor.device_mesh)
    local = redistribute(dtensor, None, replicated).to_local(grad_placements=gradient)
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local
