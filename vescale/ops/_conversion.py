"""Conversions of DTensors: to other placements, to local tensors and back, each with a rule for the gradient.

===============  =========================================  ======================================================
function         forward                                    gradient
===============  =========================================  ======================================================
``convert``      redistributes from ``src`` to ``dst``      arrives with any placements; redistributed to
                                                            ``grad_source``, then to ``grad_target``, by default
                                                            ``src`` (Replicate for Partial)
``enter_local``  returns the local tensor; no               the local gradient, with placements
                 communication                              ``grad_placements``
``leave_local``  wraps a local tensor as a DTensor; no      redistributed to ``grad_placements``, by default the
                 communication                              DTensor's (Replicate for Partial); communication here
                                                            is implicit
``wrap_global``  shards a tensor that every rank has; no    gathered: the caller's gradient is the whole one
                 communication
===============  =========================================  ======================================================

Results are fresh DTensors and no views of the input, so that the model may write to them in place. Only ``convert`` at a
module's boundary (``outdated``) keeps what one device has there: one tensor on both sides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import unserializable_hook

from vescale.comm import LISTENERS, requested_by, watch_holder
from vescale.compat import (
    DTensorSpec,
    has_tangent,
    in_dual_level,
    in_transform,
    intern_spec,
    is_computed,
    local_of,
    make_dtensor,
    make_spec,
    native_conversions,
    no_torch_function,
    permit_writes,
    replace_parts,
    set_local,
    spec_of,
    spec_of_result,
    tell_moved_operand,
    without_transforms,
)
from vescale.errors import OpPlacementError, TransformError
from vescale.ops._boundary_copies import IN_PYTHON, note_operand, pass_boundary, require_current
from vescale.ops._boundary_copies import settle as _settle
from vescale.ops._observer import report_implicit_move
from vescale.placements import (
    NativeMove,
    contiguous_stride,
    is_pending,
    keeps_expanded,
    move_local,
    moved_stride,
    native_move,
    own_region,
    shard_dim,
    stride_like,
    without_partials,
)

# Specs of converted tensors, and what C++ asks about conversions once for each kind (``csrc/conversion.h``,
# ``csrc/local_regions.h``).

Placements = tuple[Placement, ...]
# None for axes that keep their placement.
Stage = tuple[Placement | None, ...]


def cut(x: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """The local part of a tensor that every rank has; a copy unless it is the whole tensor. No communication."""
    replicated = (Replicate(),) * mesh.ndim
    if tuple(placements) == replicated:
        return x
    return move_local(x, mesh, x.shape, replicated, placements).wait()


def plan_move(spec: DTensorSpec, target: Stage) -> tuple[DTensorSpec, NativeMove | None] | None:
    """How C++ brings a DTensor with ``spec`` to ``target``, see :func:`vescale.compat.native_conversions`."""
    complete = tuple(f if t is None else t for f, t in zip(spec.placements, target))
    meta = spec.tensor_meta
    if complete == tuple(spec.placements):
        return spec, None
    if len(target) != len(spec.placements) or meta is None:
        return None
    result = intern_spec(_moved_spec(spec, complete))
    move = native_move(spec.mesh, meta.shape, spec.placements, complete, meta.dtype)
    return None if result is None or move is None else (result, move)


def _moved_spec(spec: DTensorSpec, target: Placements) -> DTensorSpec:
    stride = _moved_stride(spec.shape, spec.stride, spec.placements, target, spec.mesh)
    assert spec.tensor_meta is not None
    return make_spec(spec.mesh, target, spec.shape, stride, spec.tensor_meta.dtype)


def _moved_stride(
    shape: Sequence[int], stride: Sequence[int], source: Placements, target: Placements, mesh: DeviceMesh
) -> tuple[int, ...]:
    keeps = keeps_expanded(source, target, tuple(mesh.shape))
    return moved_stride(shape, stride) if keeps else contiguous_stride(shape)


def as_summand(grad: DTensor, target: Placements) -> DTensor:
    """Convert ``grad`` from Replicate to Partial on the axes where ``target`` is Partial, by dividing it by the size of the
    axis on every rank. Autograd does the same before it adds a Replicate and a Partial gradient."""
    axes = [axis for axis, (g, t) in enumerate(zip(grad.placements, target)) if g.is_replicate() and t == Partial()]
    if not axes:
        return grad
    spec, local = spec_of(grad), local_of(grad)
    for axis in axes:
        local = local / spec.mesh.size(axis)
    placements = [target[axis] if axis in axes else p for axis, p in enumerate(spec.placements)]
    return make_dtensor(local, make_spec(spec.mesh, placements, spec.shape, spec.stride, local.dtype))


def gradient_spec(grad: torch.Tensor, like: DTensorSpec, placements: Placements | None) -> DTensorSpec:
    """The spec of the gradient of a tensor with the spec ``like``, of which ``grad`` is the local part."""
    placements = without_partials(like.placements) if placements is None else placements
    spec = make_spec(like.mesh, placements, like.shape, stride_like(grad, like.shape), grad.dtype)
    return (
        spec_of_result(spec.mesh, placements, spec.tensor_meta, (like,)) if spec.placements == like.placements else spec
    )


def plan_gradient(*given: Any) -> tuple[DTensorSpec] | None:
    spec = intern_spec(gradient_spec(*given))
    return None if spec is None else (spec,)


def plan_leaving(
    local: torch.Tensor, mesh: DeviceMesh, placements: Placements, shape: Sequence[int]
) -> tuple[DTensorSpec, Placements] | None:
    """The spec of the DTensor around a local tensor, and the default placements of its gradient."""
    spec = intern_spec(make_spec(mesh, placements, shape, stride_like(local, shape), local.dtype))
    return None if spec is None else (spec, without_partials(placements))


def whole_spec(x: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> DTensorSpec:
    """The spec of a DTensor of a tensor that every rank has, and of which it takes its part."""
    replicated = (Replicate(),) * mesh.ndim
    stride = (
        x.stride() if placements == replicated else _moved_stride(x.shape, x.stride(), replicated, placements, mesh)
    )
    return make_spec(mesh, placements, x.shape, stride, x.dtype)


def plan_cut(
    x: torch.Tensor, mesh: DeviceMesh, placements: Placements
) -> tuple[DTensorSpec, Placements, NativeMove | None] | None:
    """The spec of :func:`wrap_global`'s result, the placements of its gradient, and how C++ cuts the tensor."""
    region, replicated = own_region(x.shape, placements, mesh), (Replicate(),) * mesh.ndim
    spec = None if region is None else intern_spec(whole_spec(x, mesh, placements))
    if spec is None or placements == replicated:
        return None if spec is None else (spec, replicated, None)
    move = native_move(mesh, x.shape, replicated, placements, x.dtype)
    return None if move is None else (spec, replicated, move)


@functools.lru_cache(maxsize=4096)
def stages_between(
    found: Placements, target: Stage, grad_source: Stage | None, grad_target: Stage | None, passes_gradient: bool
) -> tuple[Stage, tuple[Stage, ...]]:
    """The target, and the placements that the gradient is brought to, one after the other. Equal calls get the same objects,
    by whose addresses C++ remembers what to do."""
    back = tuple(None if t is None else g for t, g in zip(target, without_partials(found)))
    last = back if grad_target is None else tuple(b if g is None else g for b, g in zip(back, grad_target))
    if passes_gradient:
        return target, ()
    return target, (last,) if grad_source is None else (grad_source, last)


# Transforms of ``torch.func`` and forward-mode differentiation, for which changes of placements have no rules.


def refuse_transforms(tensors: Iterable[torch.Tensor], where: str) -> None:
    """``where``: what they enter. Raises TransformError where a running transform has wrapped one, or one has a tangent."""
    is_transformed = in_transform()
    for x in tensors if is_transformed or in_dual_level() else ():
        if (is_transformed and without_transforms(x) is not x) or has_tangent(x):
            raise _error(where)


def is_differentiated(x: torch.Tensor) -> bool:
    """Whether what is made of ``x`` is linked to it: by a gradient, or a tangent."""
    return (x.requires_grad and torch.is_grad_enabled()) or has_tangent(x)


def apply_outside(function: type[torch.autograd.Function], *args: Any, where: str = "") -> Any:
    """``function.apply``, which has a rule for gradients only. Raises TransformError inside of a transform."""
    if in_transform() or any(isinstance(x, torch.Tensor) and has_tangent(x) for x in args):
        raise _error(where or "a DTensor")
    return function.apply(*args)


def _error(where: str) -> TransformError:
    kind = "a transform of torch.func (grad, vjp, vmap, ...)" if in_transform() else "forward-mode differentiation"
    return TransformError(
        f"{kind} of {where}: placements change here, which only reverse mode supports. Expected reverse mode: "
        "torch.autograd.grad(..., create_graph=True), and jacobian, jvp, vjp and hvp of torch.autograd.functional; "
        "or functions of tensors, and modules without entries, inside of the model"
    )


def _moved(x: DTensor, target: Placements, requester: str) -> DTensor:
    """Redistribute ``x`` outside of autograd; the result is a fresh DTensor also when the placements are the same."""
    result: DTensor | None = NATIVE.move(x, target)
    return _moved_in_python(x, target, requester) if result is None else result


def _moved_in_python(x: DTensor, target: Placements, requester: str) -> DTensor:
    spec, local = spec_of(x), local_of(x)
    if tuple(spec.placements) == target:
        return make_dtensor(local, spec)
    with requested_by(requester), no_torch_function():
        moved = move_local(local, spec.mesh, x.shape, spec.placements, target).wait()
    return make_dtensor(moved, _moved_spec(spec, target))


def bring(x: DTensor, target: Sequence[Placement], op: str, operand: str | None) -> DTensor:
    """Redistribute the operand ``operand`` of ``op`` to ``target``, outside of autograd; None: ``op`` has no rule for parts.

    Communication is implicit: the model that runs counts and reports it, and raises instead in strict mode. Outside of
    models, ranks that come to it alone are found before they communicate.
    """
    target = tuple(target)
    if tuple(x.placements) == target:
        return x
    report_implicit_move(op, operand, local_of(x), x.placements, target)
    tell_moved_operand(x, target, op)
    return _moved(x, target, f"implicit: {op}")


def whole(x: DTensor, op: str) -> DTensor:
    """``x`` on every rank, for an ``op`` whose kernel takes no empty part. It does not count as implicit."""
    return convert(x, (Replicate(),) * x.device_mesh.ndim, requester=f"statistic: {op}")


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, target: Any, grad_stages: Any, requester: str) -> DTensor:
        ctx.grad_stages, ctx.requester = grad_stages, requester
        ctx.set_materialize_grads(False)
        result = _moved(x, target, requester)
        made = make_dtensor(local_of(result), spec_of(result), requires_grad=x.requires_grad)
        watch_holder(made)
        return made

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[Any, ...]:
        if grad is not None:
            grad = _differentiated(grad, ctx.grad_stages, f"{ctx.requester}: gradient")
        return grad, None, None, None


class _Pass(torch.autograd.Function):
    """A boundary where nothing moves. The result is a view of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, grad_stages: Any, requester: str) -> DTensor:
        ctx.grad_stages, ctx.requester = grad_stages, requester
        ctx.set_materialize_grads(False)
        return x

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[Any, ...]:
        return _Convert.backward(ctx, grad)[:3]


def convert(
    x: DTensor,
    target: Sequence[Placement | None],
    *,
    grad_source: Sequence[Placement | None] | None = None,
    grad_target: Sequence[Placement | None] | None = None,
    passes_gradient: bool = False,
    requester: str = "",
    outdated: Callable[[], None] | None = None,
) -> DTensor:
    """Redistribute ``x`` to ``target``, and its gradient by the rule of the module's table.

    An autograd node is inserted also when the placements are the same: a gradient that arrives Partial where the tensor is
    Replicate is reduced here.

    Args:
        target: None on an axis keeps the placement there, and passes the gradient as it arrives.
        grad_source, grad_target: placements of the gradient, see the table; None on an axis: the default.
        passes_gradient: pass the gradient as it arrives, for the caller to reduce.
        requester: name of the communication in the ledger.
        outdated: ``x`` is passed on at the boundary of a module, where one device has one tensor. Where nothing moves, the
            result is ``x``, or a view of it, if it requires a gradient: they share memory, version and history. Where data
            move, what reads one of the two after a write to the other calls ``outdated()`` before, which raises: every op;
            without the C++ dispatcher, every torch function in a model's forward.
    """
    target, stages = stages_between(
        tuple(x.placements),
        tuple(target),
        None if grad_source is None else tuple(grad_source),
        None if grad_target is None else tuple(grad_target),
        passes_gradient,
    )
    result: DTensor | None = NATIVE.convert(x, target, stages, requester, outdated)
    if result is not None:
        return result
    require_current(x)
    complete = tuple(f if t is None else t for f, t in zip(x.placements, target))
    with no_torch_function():
        if outdated is not None and complete == tuple(x.placements) and not x.is_inference():
            if not x.requires_grad or not torch.is_grad_enabled():
                return x
            passed: DTensor = apply_outside(_Pass, x, stages, requester, where=requester)
            set_local(passed, local_of(x))  # and not an alias of it, as autograd makes
            permit_writes(passed, x)
            return passed
        made: DTensor = apply_outside(_Convert, x, complete, stages, requester, where=requester)
    if outdated is not None:
        NATIVE.link_copy(x, made, outdated)
    return pass_boundary(x, made, outdated)


class PreparedConversion:
    """:func:`convert` of tensors with these placements, for many calls, outside of torch function modes. ``target`` and
    ``stages`` say where it brings tensors and gradients; None on an axis keeps what is there."""

    def __init__(self, found: Placements, target: Stage, grads: tuple[Stage | None, Stage | None], who: str) -> None:
        self.target, self.stages = stages_between(found, target, *grads, False)
        complete = tuple(f if t is None else t for f, t in zip(found, self.target))
        self._native, self._others = (self.target, self.stages, who, None), (complete, self.stages, who)

    def __call__(self, x: DTensor) -> DTensor:
        made: DTensor | None = NATIVE.convert(x, *self._native)
        return made if made is not None else apply_outside(_Convert, x, *self._others, where=self._others[2])


def _move(x: DTensor, target: Stage, requester: str) -> DTensor:
    return _moved_in_python(x, tuple(f if t is None else t for f, t in zip(x.placements, target)), requester)


def _differentiated(grad: DTensor, stages: tuple[Stage, ...], requester: str) -> DTensor:
    """The gradient through the stages, with autograd. One that does not move stays the same object."""
    for stage in stages:
        complete = tuple(f if s is None else s for f, s in zip(grad.placements, stage))
        if complete == tuple(grad.placements) and not torch.is_grad_enabled():
            continue
        with no_torch_function():
            grad = _Convert.apply(grad, complete, (without_partials(grad.placements),), requester)
    return grad


def bring_with_gradient(x: DTensor, target: Sequence[Placement], op: str, operand: str) -> DTensor:
    """As :func:`bring`, with a gradient: it is redistributed the other way."""
    target = tuple(target)
    if tuple(x.placements) == target:
        return x
    report_implicit_move(op, operand, local_of(x), x.placements, target)
    return convert(x, target, requester=f"implicit: {op}")


class _Enter(torch.autograd.Function):
    """One node for all operands of an op. ``always``: those without a gradient get zeros."""

    @staticmethod
    def forward(ctx: Any, grad_placements: Any, always: bool, *operands: DTensor) -> tuple[torch.Tensor, ...]:
        ctx.specs, ctx.grad_placements = [spec_of(x) for x in operands], grad_placements
        locals_ = [local_of(x) for x in operands]
        ctx.unused = [(x.shape, x.dtype, x.device) if always else None for x in locals_]
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in locals_)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        found: list[DTensor | None] = []
        for grad, unused, spec, to in zip(grads, ctx.unused, ctx.specs, ctx.grad_placements, strict=True):
            if grad is None and unused is not None:
                grad = torch.zeros(unused[0], dtype=unused[1], device=unused[2])
            found.append(None if grad is None else _enter_gradient(grad, spec, to))
        return None, None, *found


def _enter_gradient(grad: torch.Tensor, like: DTensorSpec, placements: Placements | None) -> DTensor:
    """The DTensor with the local gradient ``grad`` of a tensor with the spec ``like``, in memory that no other one has."""
    spec = gradient_spec(grad, like, placements)
    if torch.is_grad_enabled():  # for derivatives of gradients
        return leave_local(grad, spec.mesh, spec.placements, spec.shape, "local gradient")
    return make_dtensor(grad.clone(), spec)


def enter_local(
    x: DTensor, grad_placements: Sequence[Placement] | None = None, *, always: bool = False
) -> torch.Tensor:
    """The local tensor of ``x``.

    Args:
        grad_placements: placements of the gradient whose local tensors are the gradients of the result; by default those
            of ``x``, Replicate for Partial.
        always: pass a gradient of zeros on ranks that do not use the result, where other ranks may.
    """
    entered = NATIVE.enter((x,), (grad_placements,), always)
    if entered is None:
        entered = _entered((x,), (None if grad_placements is None else tuple(grad_placements),), always)
    local: torch.Tensor = entered[0]
    return local


def enter_together(
    operands: Sequence[DTensor], grad_placements: Sequence[tuple[Placement, ...]]
) -> tuple[torch.Tensor, ...]:
    """:func:`enter_local` of each operand, for one op that takes them all."""
    entered: tuple[torch.Tensor, ...] | None = NATIVE.enter(tuple(operands), tuple(grad_placements), False)
    return _entered(operands, tuple(grad_placements), False) if entered is None else entered


def _entered(operands: Sequence[DTensor], grads: tuple[Any, ...], always: bool) -> tuple[torch.Tensor, ...]:
    for x in operands:
        require_current(x)
    with no_torch_function():
        is_linked = any(map(is_differentiated, operands))
        made = apply_outside(_Enter, grads, always, *operands) if is_linked else None
        return tuple(map(note_operand, made or (local_of(x).detach() for x in operands)))


class _LeaveLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: DTensorSpec, grad_placements: Any, op: str) -> DTensor:
        ctx.spec, ctx.grad_placements, ctx.op = spec, grad_placements, op
        ctx.set_materialize_grads(False)
        return make_dtensor(local.detach(), spec, requires_grad=local.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[Any, ...]:
        local = None if grad is None else _leave_gradient(grad, ctx.spec, ctx.grad_placements, ctx.op)
        return local, None, None, None


def _leave_gradient(grad: DTensor, spec: DTensorSpec, grad_placements: Placements, op: str) -> torch.Tensor:
    """The local gradient of a local tensor that has left as a DTensor with ``spec``."""
    with no_torch_function():
        if not torch.is_grad_enabled():
            return local_of(bring(as_summand(grad, grad_placements), grad_placements, op, "gradient"))
        # Each summand gets the whole gradient of a sum; the second derivatives of all ranks add up.
        back = [p if g.is_replicate() else g for p, g in zip(spec.placements, grad_placements)]
        return enter_local(bring_with_gradient(grad, grad_placements, op, "gradient"), back)


def leave_local(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    op: str,
    grad_placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of global ``shape`` with the local tensor ``local``. Its gradient is redistributed to ``grad_placements``,
    by default its own (Replicate for Partial), and the local part of that is the gradient of ``local``; ``op`` is the name
    under which this communication is reported."""
    left: DTensor | None = NATIVE.leave(local, mesh, placements, shape, op, grad_placements)
    if left is not None:
        return left
    spec = make_spec(mesh, placements, shape, stride_like(local, shape), local.dtype)
    with no_torch_function():
        if is_differentiated(local):
            grads = without_partials(placements) if grad_placements is None else tuple(grad_placements)
            result = apply_outside(_LeaveLocal, local, spec, grads, op, where=op)
        else:
            result = make_dtensor(local.detach(), spec)
        note_operand(local_of(result))
        return result


class _WrapGlobal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], requester: str
    ) -> DTensor:
        ctx.requester, ctx.mesh = requester, mesh
        ctx.set_materialize_grads(False)
        local = cut(x.detach(), mesh, placements)
        return make_dtensor(local, whole_spec(x, mesh, placements), requires_grad=x.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[Any, ...]:
        return None if grad is None else _wrap_gradient(grad, ctx.mesh, ctx.requester), None, None, None


def _wrap_gradient(grad: DTensor, mesh: DeviceMesh, requester: str) -> torch.Tensor:
    replicated, requester = (Replicate(),) * mesh.ndim, f"{requester}: gradient"
    if torch.is_grad_enabled():
        return enter_local(convert(grad, replicated, requester=requester))
    return local_of(_moved(grad, replicated, requester))


def wrap_global(x: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], requester: str = "") -> DTensor:
    """A DTensor with ``placements`` of a tensor that is the same on every rank. No communication in forward."""
    result: DTensor | None = NATIVE.wrap(x, mesh, placements, requester)
    if result is not None:
        return result
    with no_torch_function():
        result = apply_outside(_WrapGlobal, x, mesh, tuple(placements), requester, where=requester)
        if local_of(result).untyped_storage() is x.untyped_storage():
            share_version(x, result)
        return result


NATIVE = native_conversions(
    plan=plan_move,
    move=_move,
    differentiate=_differentiated,
    listeners=LISTENERS,
    gradient_spec=plan_gradient,
    leaving=plan_leaving,
    wrapping=plan_cut,
    enter_gradient=_enter_gradient,
    leave_gradient=_leave_gradient,
    wrap_gradient=_wrap_gradient,
)


def write_back(x: DTensor, written: torch.Tensor, target: DTensorSpec) -> None:
    """An op has written to a moved copy of ``x``, of which ``written`` is this rank's part: give ``x`` its values. A pending
    reduction that contributions of ranks cannot be found for (a norm, a product) has them as they are."""
    spec = spec_of(x)
    if any(p.is_partial() and not is_pending(p, "sum", "avg", "max", "min") for p in spec.placements):
        return replace_parts(x, written, target)
    back = move_local(written, spec.mesh, spec.shape, target.placements, spec.placements).wait()
    if back is not local_of(x):
        local_of(x).copy_(back)


def link_view(local: torch.Tensor, copy: torch.Tensor, update: Callable[[torch.Tensor], None]) -> bool:
    """Have ``update(tensor with the storage of copy)`` called before an op reads ``copy``, which is viewed in place of
    ``local``, after a write to ``local``. False where nothing watches for that."""
    return bool(NATIVE.link_view(local, copy, update))


def share_version(x: torch.Tensor, copy: DTensor) -> None:
    """Writes to one of the two count as writes to both, for autograd."""
    NATIVE.share_version(copy, x)


def settle_view(copy: torch.Tensor) -> None:
    """An op has written to a copy that is viewed, and its source has the same values by now."""
    NATIVE.settle_view(copy)


def settle(written: DTensor, other: DTensor) -> None:
    """Of the two tensors of a conversion with ``outdated``, ``other`` has the values of ``written`` now."""
    if IN_PYTHON:
        _settle(local_of(written), local_of(other))
    else:
        NATIVE.settle_group(local_of(written), local_of(other))


# Replicated gradients of sharded tensors, such as that of ``x.sum()``: one number, expanded to the shape of ``x``.


def with_cut_gradient(x: DTensor) -> DTensor:
    """Return ``x``, an output of a model, with a hook that shards its gradient like ``x`` on each axis where the gradient is
    Replicate. The backward then runs on local shards. The hook does not communicate."""
    placements = spec_of(x).placements
    if x.requires_grad and is_computed(x) and any(not (p.is_replicate() or p.is_partial()) for p in placements):
        x.register_hook(functools.partial(_cut, placements))
    return x


@unserializable_hook
def _cut(placements: tuple[Placement, ...], grad: torch.Tensor) -> torch.Tensor | None:
    if not isinstance(grad, DTensor):
        return None
    arrived = spec_of(grad).placements
    target = [p if g.is_replicate() and not p.is_partial() else None for p, g in zip(placements, arrived)]
    return convert(grad, target, requester="gradient") if any(p is not None for p in target) else None


# Local calls of functions whose rows are independent: sharded rows in, replicated parameters, sharded rows out.
#
# ``rows`` says for each mesh axis whether it shards the rows. Operands with other placements are gathered, which is implicit
# communication.


def sharded_rows(x: DTensor, batch_dim: int) -> list[bool]:
    """The axes along which ranks hold different rows of ``x``."""
    return [shard_dim(p) == batch_dim and p.is_shard() for p in x.placements]


def local_rows(x: DTensor, rows: Sequence[bool], dim: int, name: str, operand: str) -> torch.Tensor:
    """This rank's rows of ``x``, along dim ``dim``."""
    return enter_local(bring_with_gradient(x, _placements(rows, dim), name, operand))


def local_parameter(parameter: DTensor, rows: Sequence[bool], name: str) -> torch.Tensor:
    """The whole parameter, whose gradient is the sum of the gradients of all rows."""
    whole = bring_with_gradient(parameter, (Replicate(),) * parameter.device_mesh.ndim, name, "weight")
    return enter_local(whole, [Partial() if sharded else Replicate() for sharded in rows])


def rows_from_local(
    local: torch.Tensor, dim: int, num_rows: int, mesh: DeviceMesh, rows: Sequence[bool], name: str
) -> DTensor:
    """The result of all ranks, of ``num_rows`` rows along ``dim``."""
    shape = [num_rows if d == dim else size for d, size in enumerate(local.shape)]
    return leave_local(local, mesh, _placements(rows, dim), shape, name)


def _placements(rows: Sequence[bool], dim: int) -> tuple[Placement, ...]:
    return tuple(Shard(dim) if sharded else Replicate() for sharded in rows)


# Gradients without derivatives: differentiating them raises, instead of leaving out a part.
#
# ``torch.autograd.function.once_differentiable`` raises neither where the incoming gradient is constant (that of
# ``x.sum()``),
# nor where derivatives are computed for some tensors only (``torch.autograd.grad(y, inputs)``).


def differentiable_once(
    gradients: Sequence[torch.Tensor | None], sources: Sequence[torch.Tensor | None], message: str
) -> tuple[torch.Tensor | None, ...]:
    """The value for a ``backward`` to return: ``gradients``, which were computed without autograd from ``sources`` (the
    incoming gradient and the inputs). Under ``create_graph``, differentiating them raises RuntimeError(message)."""
    parts = [x for x in sources if x is not None and x.requires_grad]
    if not torch.is_grad_enabled() or not parts:
        return tuple(gradients)
    given = [x for x in gradients if x is not None]
    marked = iter(_Once.apply(message, len(given), *given, *parts))
    return tuple(None if x is None else next(marked) for x in gradients)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, message: str, num: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.message = message
        return tuple(x.detach() for x in tensors[:num])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise OpPlacementError(ctx.message)
