"""``from_local`` and ``to_local``: between this rank's plain tensor and a DTensor, differentiable.

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
from vescale.compat import begin_world, current_mesh, make_dtensor, rank_in_mesh, stock
from vescale.errors import PlacementError
from vescale.placements._custom_placement import has_custom
from vescale.placements._placement_kinds import ragged_axis, shard_dim, without_partials
from vescale.placements._ragged import RaggedShard
from vescale.placements._redistribute import (
    Redistribute,
    contiguous_spec,
    move_local,
    normalize_placements,
    resolve_gradient,
)
from vescale.placements._region import local_region, own_region


def to_local(dtensor: DTensor, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
    """This rank's part; differentiable. A ragged DTensor's local tensor is flat.

    ``grad_placements`` are those of the gradient of the returned tensor; None: the DTensor's own, Replicate for Partial.
    No communication. Raises ValueError if those placements assign other elements to some rank than the DTensor's. (The
    method ``DTensor.to_local`` is PyTorch's own, and finds that out in backward.)

    Args:
        dtensor: any DTensor.
    """
    if grad_placements is not None and has_custom([*dtensor.placements, *grad_placements]):
        grad_placements = resolve_gradient(
            "to_local", dtensor.placements, grad_placements, dtensor.shape, dtensor.device_mesh
        )
    return dtensor.to_local(grad_placements=grad_placements)


def local_gradient(grad: torch.Tensor, spec: Any, grad_placements: Sequence[Placement] | None) -> DTensor:
    """The gradient of the local tensor of a DTensor with ``spec``, as a DTensor: ``to_local``'s backward; differentiable."""
    placements = resolve_gradient("to_local", spec.placements, grad_placements, spec.shape, spec.mesh)
    wrapped: DTensor = _FromLocal.apply(grad, spec.mesh, placements, tuple(spec.shape), without_partials(placements))
    return wrapped


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
        run_check: compare what the ranks pass (one small all-gather), so that placements or a local tensor that do not
            fit, on whatever rank, are an error on every rank, and broadcast along the Replicate axes, as stock
            ``from_local`` does. Otherwise there is no communication, and only the rank that passes something wrong raises.
        shape: the global shape; needed for ragged placements, whose local tensors do not determine it.
        stride: of the global tensor; the result is row-major, as every local tensor of ours is.
        grad_placements: the placements that the gradient is brought to; None: ``placements``, Replicate for Partial.
        local_tensor: what this rank holds; flat for ragged placements.

    Raises:
        RuntimeError: a local tensor that is a DTensor.
        ValueError: no ``shape`` for a ragged placement; a local tensor of another size than the placements assign to
            this rank; gradient placements that assign other elements to some rank than ``placements``.
    """
    begin_world()
    placements = list(placements) if placements is not None else None
    if not has_custom([*(placements or ()), *(grad_placements or ())]):
        newer = {} if grad_placements is None else {"grad_placements": grad_placements}  # before 2.12 there are none
        return stock().from_local(
            local_tensor, device_mesh, placements, run_check=run_check, shape=shape, stride=stride, **newer
        )
    device_mesh = device_mesh or current_mesh()
    placements = placements if placements is not None else [Replicate()] * device_mesh.ndim
    arguments = _same_on_all_ranks if run_check else _arguments
    shape, resolved, gradient = arguments(local_tensor, device_mesh, placements, shape, grad_placements)
    if device_mesh.device_type != local_tensor.device.type and not local_tensor.is_meta:
        local_tensor = local_tensor.to(device_mesh.device_type)
    if run_check:
        local_tensor = _share_replicas(local_tensor, device_mesh, resolved)
    return _FromLocal.apply(local_tensor, device_mesh, resolved, shape, gradient)


_Arguments = tuple[tuple[int, ...], tuple[Placement, ...], tuple[Placement, ...]]


def _arguments(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int] | None,
    grad_placements: Sequence[Placement] | None,
) -> _Arguments:
    """The global shape, the placements and those of the gradient; raises what ``from_local`` documents."""
    if isinstance(local, DTensor):
        raise RuntimeError(f"from_local takes this rank's plain tensor, but got a DTensor placed as {local.placements}")
    shape = tuple(shape) if shape is not None else tuple(_shape_from_local(local, mesh, placements))
    resolved = normalize_placements(placements, shape, mesh)
    gradient = resolve_gradient("from_local", resolved, grad_placements, shape, mesh)
    coordinate = mesh.get_coordinate()
    if coordinate is not None:
        expected = local_region(shape, resolved, tuple(mesh.shape), coordinate).local_shape
        if not _fits(local.shape, expected, resolved):
            raise PlacementError(_misfit(local, expected, shape, resolved, coordinate))
    return shape, resolved, gradient


def _same_on_all_ranks(local: torch.Tensor, mesh: DeviceMesh, *passed: Any) -> _Arguments:
    """The same; every rank of the mesh raises when one of them does, or when the ranks differ. One small all-gather."""
    if not rank_in_mesh(mesh):
        return _arguments(local, mesh, *passed)
    problem, found = "", None
    try:
        found = _arguments(local, mesh, *passed)
    except (ValueError, RuntimeError) as error:
        problem = str(error)
    group = axis_group(mesh, tuple(range(mesh.ndim))).group
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, (problem, found and (*found, local.dtype)), group=group)
    if any(wrong for wrong, _ in answers):
        wrong = [
            f"rank {rank}: {text}" for rank, (text, _) in zip(dist.get_process_group_ranks(group), answers) if text
        ]
        raise PlacementError("\n".join(wrong))
    if any(other != answers[0][1] for _, other in answers):
        passed_by = [
            f"rank {rank}: shape {shape}, placements {placements}, gradient {gradient}, {dtype}"
            for rank, (_, (shape, placements, gradient, dtype)) in zip(dist.get_process_group_ranks(group), answers)
        ]
        raise PlacementError(
            "from_local: the arguments differ between ranks; pass the same on all ranks:\n" + "\n".join(passed_by)
        )
    assert found is not None
    return found


def _share_replicas(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """The tensor of the first rank on every Replicate axis, in the memory that was passed, as in stock ``from_local``."""
    if not rank_in_mesh(mesh) or not local.numel():
        return local
    local = local.contiguous()
    for axis, placement in enumerate(placements):
        if placement.is_replicate() and mesh.size(axis) > 1:
            group = axis_group(mesh, (axis,))
            first = next(rank for rank, where in enumerate(group.coordinates) if where[axis] == 0)
            dist.broadcast(local.detach(), group=group.group, group_src=first)
    return local


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
        region = own_region(shape, placements, mesh)
        local = local.new_empty(0) if region is None else local.reshape(region.local_shape)
        view = local.view_as(local)
        return make_dtensor(
            view, contiguous_spec(mesh, placements, shape, local.dtype), requires_grad=local.requires_grad
        )

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return None, None, None, None, None
        moved = Redistribute.apply(grad, ctx.grad_placements, False, grad.dtype, grad.dtype, grad.dtype)
        local = moved.to_local(grad_placements=without_partials(ctx.grad_placements))
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


def _shape_from_local(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> list[int]:
    """The global shape when every rank's part has the same shape, as stock ``from_local`` assumes."""
    if any(isinstance(placement, RaggedShard) for placement in placements):
        raise PlacementError(
            f"from_local with placements {tuple(placements)}: the flat local tensor of a ragged placement does not tell "
            "the global shape; pass shape="
        )
    shape = list(local.shape)
    for axis, placement in enumerate(placements):
        dim = shard_dim(placement)
        if dim is not None:
            shape[dim] *= mesh.size(axis)
    return shape


# ``distribute_tensor`` for every placement. With stock placements only, it does what its stock namesake does.


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
    begin_world()
    placements = list(placements) if placements is not None else None
    if placements is None or not has_custom(placements):
        return stock().distribute_tensor(tensor, device_mesh, placements, src_data_rank=src_data_rank)
    device_mesh = device_mesh or current_mesh()
    if not tensor.is_leaf:
        raise RuntimeError(
            "distribute_tensor takes a leaf tensor, but this one has a gradient history: use from_local, or detach it"
        )
    wanted = normalize_placements(placements, tensor.shape, device_mesh)
    if isinstance(tensor, DTensor):
        if tensor.device_mesh == device_mesh and tensor.placements == wanted:
            return tensor
        raise PlacementError(
            f"distribute_tensor got a DTensor with placements {tensor.placements} for {wanted}; call redistribute"
        )
    if any(placement.is_partial() for placement in wanted):
        raise PlacementError(
            f"distribute_tensor cannot place as {wanted}: the terms of a Partial are not known; use from_local"
        )
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
