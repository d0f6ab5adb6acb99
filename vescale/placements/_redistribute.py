"""``redistribute`` and ``full_tensor`` for every placement, differentiable.

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
    local_of,
    make_dtensor,
    make_spec,
    spec_of,
    stock,
)
from vescale.errors import OtherMeshError
from vescale.placements._custom_placement import has_custom
from vescale.placements._dtensor_specs import resolve_gradient
from vescale.placements._local_redistribution import move_local
from vescale.placements._normalized_placements import normalize_placements
from vescale.placements._placement_kinds import without_partials
from vescale.placements._strides import contiguous_stride

__all__ = ["Redistribute", "full_tensor", "redistribute", "redistribute_local"]


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
    pending reduction to another. Communication: see ``vescale/placements/_local_redistribution.py``.

    Args:
        placements: one for each mesh axis.
        async_op: return before the last collective has finished; the local tensor waits on first use. The backward
            redistribution is asynchronous then, too.
        forward_dtype: cast to this dtype before communicating; the result has it. None: keep.
        backward_dtype: communicate gradients in this dtype; they then get the input's. None: the input's.
        dtensor: any DTensor.
        device_mesh: None, or the tensor's own.

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
        raise OtherMeshError(
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
            stride = contiguous_stride(dtensor.shape)
        if moved.dtype != result_dtype:
            moved = moved.to(result_dtype)
        result = make_spec(spec.mesh, placements, dtensor.shape, stride, moved.dtype)
        return make_dtensor(moved, result, requires_grad=dtensor.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor | None, ...]:
        target = without_partials(ctx.placements)
        moved = Redistribute.apply(grad, target, ctx.async_op, ctx.backward_dtype, ctx.dtype, grad.dtype)
        return moved, None, None, None, None, None


def redistribute_local(local: torch.Tensor, current: Any, target: Any, *, async_op: bool = False) -> torch.Tensor:
    """``redistribute`` on local tensors and specs, outside autograd: what the op dispatcher calls."""
    pending = move_local(local, current.mesh, current.shape, current.placements, target.placements)
    return as_async_tensor(pending.out, pending) if async_op and pending.out is not local else pending.wait()


def full_tensor(dtensor: DTensor, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
    """The global tensor on every rank; differentiable. Communicates as ``redistribute`` to Replicate does.

    ``grad_placements``, of Replicate and Partial, are those of the gradient of the returned tensor; None: Replicate.

    Args:
        dtensor: any DTensor.
    """
    replicated = [Replicate()] * dtensor.device_mesh.ndim
    gradient = resolve_gradient("full_tensor", replicated, grad_placements, dtensor.shape, dtensor.device_mesh)
    local = redistribute(dtensor, None, replicated).to_local(grad_placements=gradient)
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local
