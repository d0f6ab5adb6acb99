"""``distribute_tensor``, ``from_local``, ``to_local`` and ``redistribute`` for every placement, differentiable.

With stock placements only, these do what their stock namesakes do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import axis_group
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
from vescale.placements._kinds import has_custom, ragged_axis, shard_dim
from vescale.placements._move import move_local
from vescale.placements._normalize import normalize_placements
from vescale.placements._ragged import RaggedShard
from vescale.placements._region import local_region, same_regions

__all__ = ["distribute_tensor", "from_local", "full_tensor", "redistribute", "redistribute_local", "to_local"]


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
    spec = _contiguous_spec(device_mesh, wanted, tensor.shape, tensor.dtype)
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
    return _Redistribute.apply(
        dtensor, wanted, async_op, forward_dtype or own, forward_dtype or own, backward_dtype or own
    )


class _Redistribute(torch.autograd.Function):
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
            stride = _row_major(dtensor.shape)
        if moved.dtype != result_dtype:
            moved = moved.to(result_dtype)
        result = make_spec(spec.mesh, placements, dtensor.shape, stride, moved.dtype)
        return make_dtensor(moved, result, requires_grad=dtensor.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor | None, ...]:
        target = _gradient_placements(ctx.placements)
        moved = _Redistribute.apply(grad, target, ctx.async_op, ctx.backward_dtype, ctx.dtype, grad.dtype)
        return moved, None, None, None, None, None


def redistribute_local(local: torch.Tensor, current: Any, target: Any, *, async_op: bool = False) -> torch.Tensor:
    """``redistribute`` on local tensors and specs, outside autograd: what the op dispatcher calls."""
    pending = move_local(local, current.mesh, current.shape, current.placements, target.placements)
    return as_async_tensor(pending.out, pending) if async_op and pending.out is not local else pending.wait()


def to_local(dtensor: DTensor, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
    """This rank's part; differentiable. A ragged DTensor's local tensor is flat.

    ``grad_placements`` says how the gradient of the returned tensor lies; None: as the DTensor, Replicate for Partial.
    No communication. Raises ValueError when those placements give some rank other elements than the DTensor's.
    """
    if not has_custom([*dtensor.placements, *(grad_placements or ())]):
        return stock().to_local(dtensor, grad_placements=grad_placements)
    if not torch.is_grad_enabled():
        local = local_of(dtensor)
    else:
        gradient = _resolve_gradient(
            "to_local", dtensor.placements, grad_placements, dtensor.shape, dtensor.device_mesh
        )
        local = _ToLocal.apply(dtensor, gradient)
    if isinstance(dtensor, torch.nn.Parameter) and not isinstance(local, torch.nn.Parameter):
        local = local.view_as(local) if local is local_of(dtensor) else local
        local._is_param = True  # as stock to_local does
    return local


def full_tensor(dtensor: DTensor, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
    """The global tensor on every rank; differentiable. Communicates as ``redistribute`` to Replicate does.

    ``grad_placements`` says how the gradient of the returned tensor lies, Replicate or Partial; None: Replicate.
    """
    replicated = [Replicate()] * dtensor.device_mesh.ndim
    gradient = _resolve_gradient("full_tensor", replicated, grad_placements, dtensor.shape, dtensor.device_mesh)
    local = _ToLocal.apply(redistribute(dtensor, None, replicated), gradient)
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


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
        gradient = _gradient_placements(ctx.grad_placements)  # what flows back from this DTensor in a second backward
        return _FromLocal.apply(grad, ctx.mesh, ctx.grad_placements, tuple(ctx.shape), gradient), None


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
    """A DTensor around each rank's part; differentiable.

    Args:
        device_mesh: None: the mesh of the surrounding ``with mesh:``.
        run_check: compare the ranks' local tensors (one small all-gather), so that a wrong one is an error on every
            rank. Otherwise there is no communication, and only the rank that passes a wrong local tensor raises.
        shape: the global shape; needed for ragged placements, whose local tensors do not tell it.
        stride: of the global tensor; the result is row-major, as every local tensor of ours is.
        grad_placements: the placements that the gradient is brought to; None: ``placements``, Replicate for Partial.

    Raises:
        ValueError: no ``shape`` for a ragged placement; a local tensor of another size than the placements give this
            rank; gradient placements that give some rank other elements than ``placements``.
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
    device_mesh = device_mesh or current_mesh()
    placements = placements if placements is not None else [Replicate()] * device_mesh.ndim
    if shape is None:
        shape = _shape_from_local(local_tensor, device_mesh, placements)
    resolved = normalize_placements(placements, shape, device_mesh)
    gradient = _resolve_gradient("from_local", resolved, grad_placements, shape, device_mesh)
    if device_mesh.device_type != local_tensor.device.type and not local_tensor.is_meta:
        local_tensor = local_tensor.to(device_mesh.device_type)
    if run_check:
        _check_locals(local_tensor, device_mesh, resolved, shape)
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
            if not _fits(local.shape, expected, placements):
                raise ValueError(_misfit(local, expected, shape, placements, coordinate))
            local = local.reshape(expected)
        view = local.view_as(local)
        return make_dtensor(
            view, _contiguous_spec(mesh, placements, shape, local.dtype), requires_grad=local.requires_grad
        )

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return None, None, None, None, None
        moved = _Redistribute.apply(grad, ctx.grad_placements, False, grad.dtype, grad.dtype, grad.dtype)
        local = _ToLocal.apply(moved, _gradient_placements(ctx.grad_placements))
        # Ranks outside the mesh have an empty tensor whatever the shape of the one that they passed.
        local = local.reshape(ctx.local_shape) if rank_in_mesh(grad.device_mesh) else local.new_zeros(ctx.local_shape)
        return local, None, None, None, None


def _fits(local_shape: Sequence[int], expected: tuple[int, ...], placements: Sequence[Placement]) -> bool:
    """Whether a local tensor has the shape its placements give; for a flat one the number of elements is enough."""
    return tuple(local_shape) == expected or (
        ragged_axis(placements) is not None and math.prod(local_shape) == expected[0]
    )


def _misfit(
    local: torch.Tensor,
    expected: tuple[int, ...],
    shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> str:
    return (
        f"from_local: a tensor of global shape {tuple(shape)} with placements {tuple(placements)} has a local tensor of "
        f"shape {expected} at mesh coordinate {tuple(coordinate)}, but the one given has shape {tuple(local.shape)}; "
        "pass this rank's part, or the right shape="
    )


def _check_locals(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> None:
    """Raise on every rank of the mesh when any rank's local tensor does not fit."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return
    expected = local_region(shape, placements, tuple(mesh.shape), coordinate).local_shape
    problem = (
        "" if _fits(local.shape, expected, placements) else _misfit(local, expected, shape, placements, coordinate)
    )
    group = axis_group(mesh, tuple(range(mesh.ndim))).group
    problems: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    if any(problems):
        raise ValueError("\n".join(filter(None, problems)))


def _resolve_gradient(
    caller: str,
    placements: Sequence[Placement],
    grad_placements: Sequence[Placement] | None,
    shape: Sequence[int],
    mesh: DeviceMesh,
) -> tuple[Placement, ...]:
    """The placements of a gradient, checked: a gradient's local tensor has the elements of the local tensor."""
    if grad_placements is None:
        return _gradient_placements(placements)
    gradient = normalize_placements(grad_placements, shape, mesh)
    if not same_regions(tuple(shape), tuple(placements), gradient, tuple(mesh.shape)):
        raise ValueError(
            f"{caller}: grad_placements {gradient} give a rank other elements than placements {tuple(placements)}, but "
            "the gradient of a local tensor has its shape; keep the sharded axes as they are, and use Replicate or "
            "Partial on the others"
        )
    return gradient


def _gradient_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


def _contiguous_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype
) -> Any:
    return make_spec(mesh, placements, shape, _row_major(shape), dtype)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as PyTorch computes them (a dim of size 0 counts as 1)."""
    stride = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        stride[dim] = stride[dim + 1] * max(shape[dim + 1], 1)
    return tuple(stride)


def _shape_from_local(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> list[int]:
    """The global shape when every rank's part has the same shape, as stock ``from_local`` assumes."""
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
