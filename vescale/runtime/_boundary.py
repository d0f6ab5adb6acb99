"""Changing placements at a border, and crossing between DTensors and local tensors, each with a rule for the gradient.

===============  =========================================  ======================================================
function         forward                                    gradient
===============  =========================================  ======================================================
``convert``      ``src -> dst``                             arrives anyhow; brought to ``grad_src``, then to
                                                            ``grad_dst``, by default ``src`` (Replicate for Partial)
``enter_local``  this rank's part; nothing moves            this rank's gradient, labelled ``grad_placements``
``leave_local``  a DTensor around it; nothing moves         brought to ``grad_placements``, by default the DTensor's
                                                            (Replicate for Partial); communication here is implicit
``wrap_global``  the global tensor is cut; nothing moves    gathered, so that the caller's gradient is the global one
===============  =========================================  ======================================================

Every result is a fresh DTensor and no view of the input, so that the model may write to it in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import asking
from vescale.compat import DTensorSpec, local_of, make_dtensor, make_spec, no_torch_function, spec_of
from vescale.placements import move_local
from vescale.runtime._runtime import locate

__all__ = [
    "bring",
    "contiguous_stride",
    "convert",
    "cut",
    "enter_local",
    "leave_local",
    "reduced",
    "stride_like",
    "wrap_global",
]


def reduced(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Where the gradient of a tensor with these placements lies: Replicate for Partial (each contribution has all)."""
    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        stride[dim] = stride[dim + 1] * max(shape[dim + 1], 1)
    return tuple(stride)


def _moved(x: DTensor, target: tuple[Placement, ...], who: str) -> DTensor:
    """``x`` at other placements, outside autograd; a fresh DTensor also when nothing moves."""
    spec, local = spec_of(x), local_of(x)
    if tuple(spec.placements) == target:
        return make_dtensor(local, spec)
    with asking(who), no_torch_function():
        moved = move_local(local, spec.mesh, x.shape, spec.placements, target).wait()
    return make_dtensor(moved, make_spec(spec.mesh, target, x.shape, contiguous_stride(x.shape), x.dtype))


def bring(x: DTensor, target: Sequence[Placement], op: str, operand: str) -> DTensor:
    """``x`` where ``op`` needs it, outside autograd; communication is implicit: counted, reported, refused in strict."""
    target = tuple(target)
    if tuple(x.placements) == target:
        return x
    _tell_implicit(x, target, op, operand)
    return _moved(x, target, f"implicit: {op}")


def _tell_implicit(x: DTensor, target: tuple[Placement, ...], op: str, operand: str) -> None:
    where = locate()
    if where is not None:
        where.runtime.implicit(where, op, operand, local_of(x), x.placements, target)


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, target: Any, grad_stages: Any, who: str) -> DTensor:
        ctx.arrived, ctx.grad_stages, ctx.who = reduced(x.placements), grad_stages, who
        ctx.set_materialize_grads(False)
        result = _moved(x, target, who)
        return make_dtensor(local_of(result), spec_of(result), requires_grad=x.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[Any, ...]:
        if grad is not None:
            for stage in ctx.grad_stages:
                target = tuple(f if s is None else s for f, s in zip(grad.placements, stage))
                grad = _Convert.apply(grad, target, (reduced(grad.placements),), f"{ctx.who}: gradient")
        return grad, None, None, None


def convert(
    x: DTensor,
    target: Sequence[Placement | None],
    *,
    grad_source: Sequence[Placement | None] | None = None,
    grad_target: Sequence[Placement | None] | None = None,
    passes_gradient: bool = False,
    who: str = "",
) -> DTensor:
    """Bring ``x`` to ``target`` (None on an axis: as it is), and its gradient back by the module's table.

    On axes where ``target`` is None the gradient passes as it arrives. An autograd node is inserted also when nothing
    changes: the gradient may arrive Partial where the tensor is Replicate, and is reduced here. ``passes_gradient``: it
    goes back as it arrives, for someone else to reduce.
    """
    found = tuple(x.placements)
    complete = tuple(f if t is None else t for f, t in zip(found, target))
    back = [None if t is None else g for t, g in zip(target, reduced(found))]
    if grad_target is None:
        grad_target = back
    else:
        grad_target = [b if g is None else g for b, g in zip(back, grad_target)]
    stages = [tuple(stage) for stage in (grad_source, grad_target) if stage is not None and not passes_gradient]
    with no_torch_function():
        return _Convert.apply(x, complete, tuple(stages), who)


def bring_with_gradient(x: DTensor, target: Sequence[Placement], op: str, operand: str) -> DTensor:
    """As :func:`bring`, for autograd to see: the gradient comes back the same way."""
    target = tuple(target)
    if tuple(x.placements) == target:
        return x
    _tell_implicit(x, target, op, operand)
    return convert(x, target, who=f"implicit: {op}")


class _EnterLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, grad_placements: tuple[Placement, ...], always: bool) -> torch.Tensor:
        local = local_of(x)
        ctx.spec, ctx.grad_placements = spec_of(x), grad_placements
        ctx.unused = (local.shape, local.dtype, local.device) if always else None
        ctx.set_materialize_grads(False)
        return local.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            if ctx.unused is None:
                return None, None, None
            size, dtype, device = ctx.unused
            grad = torch.zeros(size, dtype=dtype, device=device)
        mesh, shape = ctx.spec.mesh, ctx.spec.shape
        if torch.is_grad_enabled():  # for derivatives of gradients
            return leave_local(grad, mesh, ctx.grad_placements, shape, "local gradient"), None, None
        spec = make_spec(mesh, ctx.grad_placements, shape, stride_like(grad, shape), grad.dtype)
        return make_dtensor(grad, spec), None, None


def enter_local(
    x: DTensor, grad_placements: Sequence[Placement] | None = None, *, always: bool = False
) -> torch.Tensor:
    """This rank's part of ``x``; ``grad_placements`` say how the ranks' gradients of it make up the gradient of ``x``.

    ``always``: a rank that had no use for its part has zeros for a gradient, where other ranks may have had one.
    """
    placements = reduced(x.placements) if grad_placements is None else tuple(grad_placements)
    with no_torch_function():
        return _EnterLocal.apply(x, placements, always)


class _LeaveLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: DTensorSpec, grad_placements: Any, op: str) -> DTensor:
        ctx.placements, ctx.grad_placements, ctx.op = spec.placements, grad_placements, op
        ctx.set_materialize_grads(False)
        return make_dtensor(local.detach(), spec, requires_grad=local.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[Any, ...]:
        if grad is None:
            return None, None, None, None
        with no_torch_function():
            if not torch.is_grad_enabled():
                return local_of(bring(grad, ctx.grad_placements, ctx.op, "gradient")), None, None, None
            # Each rank's summand has got all of a sum's gradient; what they do with it adds up.
            back = [p if g.is_replicate() else g for p, g in zip(ctx.placements, ctx.grad_placements)]
            whole = bring_with_gradient(grad, ctx.grad_placements, ctx.op, "gradient")
            return enter_local(whole, back), None, None, None


def leave_local(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    op: str,
    grad_placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of global ``shape`` whose part on this rank is ``local``; ``grad_placements``, by default the DTensor's own,
    say which part of the gradient the local tensor gets."""
    spec = make_spec(mesh, placements, shape, stride_like(local, shape), local.dtype)
    with no_torch_function():
        grads = reduced(placements) if grad_placements is None else tuple(grad_placements)
        return _LeaveLocal.apply(local, spec, grads, op)


def stride_like(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Global strides with the local tensor's order of dims in memory, the same on every rank, also where a rank holds
    one index of a dim: of two dims with equal strides, the one of local size 1 lies inside the other."""
    order = sorted(range(len(shape)), key=lambda dim: (local.stride(dim), local.shape[dim] > 1, -dim))
    stride, step = [1] * len(shape), 1
    for dim in order:
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


def cut(x: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """This rank's part of a tensor that every rank has whole; a copy unless all of it. Nothing is communicated."""
    replicated = (Replicate(),) * mesh.ndim
    if tuple(placements) == replicated:
        return x
    return move_local(x, mesh, x.shape, replicated, placements).wait()


class _WrapGlobal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], who: str) -> DTensor:
        ctx.who, ctx.mesh = who, mesh
        ctx.set_materialize_grads(False)
        local = cut(x.detach(), mesh, placements)
        stride = x.stride() if local.shape == x.shape else contiguous_stride(x.shape)
        spec = make_spec(mesh, placements, x.shape, stride, x.dtype)
        return make_dtensor(local, spec, requires_grad=x.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[Any, ...]:
        if grad is None:
            return None, None, None, None
        replicated, who = (Replicate(),) * ctx.mesh.ndim, f"{ctx.who}: gradient"
        if torch.is_grad_enabled():
            return enter_local(convert(grad, replicated, who=who)), None, None, None
        return local_of(_moved(grad, replicated, who)), None, None, None


def wrap_global(x: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], who: str = "") -> DTensor:
    """A tensor that is the same on every rank, as a DTensor."""
    with no_torch_function():
        return _WrapGlobal.apply(x, mesh, tuple(placements), who)
