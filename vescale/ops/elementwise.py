"""Elementwise ops: they run on the local tensors after all operands were moved to the placements of one of them."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import all_reduce, axis_group, requested_by
from vescale.compat import (
    DTensorSpec,
    OutputSharding,
    TensorMeta,
    local_of,
    make_dtensor,
    make_spec,
    no_torch_function,
    output_meta,
    read_only,
    spec_of,
    stock_dispatch,
    tell_plain_value,
    tell_read,
)
from vescale.errors import OpPlacementError
from vescale.ops._call import Decision, OpCall, Placements, names
from vescale.ops._conversion import bring, cut, write_back
from vescale.ops._registry import OpContext, handles, is_spread, register, register_aten, register_family, replaces
from vescale.ops.reductions import gather_ranks, reduction_axes
from vescale.placements import (
    contiguous_stride,
    has_custom,
    is_pending,
    move_local,
    ragged_axis,
    shard_dim,
    stride_like,
    without_partials,
)

# Alignment: the placements that the operands of one elementwise computation are moved to, and those of its results.


# Ops whose results are sums (averages) of what each rank would compute from its own contribution, by name.
_ADDITIVE = names("add add_ sub sub_ copy_ _foreach_add _foreach_add_ _foreach_sub _foreach_sub_ _foreach_copy_")
_LINEAR_IN_FIRST = names("mul mul_ div div_ _foreach_mul _foreach_mul_ _foreach_div _foreach_div_")
_LINEAR_IN_SECOND = names("mul _foreach_mul")
_UNARY_LINEAR = names("neg neg_ _foreach_neg _foreach_neg_")
# Ops that any pending reduction passes through.
_TRANSPARENT = names("clone detach detach_ alias positive lift_fresh copy_ zero_ _foreach_copy_ _foreach_zero_")


class Alignment:
    """The placements of the operands and results of one elementwise computation.

    Attributes:
        leader: the placements of the results.
        inputs: the placements that each operand is moved to.
        prepare: what is done to operands of another shape than the results, see :class:`vescale.ops.Decision`.
        broadcasts: whether an operand with more than one element is broadcast.
    """

    def __init__(self, leader: Placements, operands: Sequence[DTensorSpec], shape: torch.Size) -> None:
        self.leader = leader
        self.is_ragged = ragged_axis(leader) is not None
        self.broadcasts = False
        self.inputs: tuple[Placements, ...] = ()
        self.prepare: tuple[tuple[int, Callable[[Any], Any]], ...] = ()
        for index, spec in enumerate(operands):
            self._place(index, spec, shape)

    def _place(self, index: int, spec: DTensorSpec, shape: torch.Size) -> None:
        if spec.shape == shape:
            self.inputs += (self.leader,)
            return
        self.inputs += (_replicated(spec),)
        if math.prod(spec.shape) == 1:
            if self.is_ragged and spec.ndim > 1:  # the local tensors that it meets are flat
                self.prepare += ((index, _as_vector),)
            return
        self.broadcasts = True
        if self.is_ragged:
            self.prepare += ((index, functools.partial(_expand_and_slice, spec.mesh, tuple(shape), self.leader)),)


def align(
    name: str,
    operands: Sequence[DTensorSpec],
    shape: torch.Size,
    mutated: Sequence[int],
    *,
    stock_may_lead: bool = False,
) -> Alignment | None:
    """The alignment of an elementwise op's operands; None when no operand can lead.

    The leader is the tensor that is written to, or the first operand with a custom placement that has the result's shape
    (with ``stock_may_lead`` the first with any placement).

    Raises RuntimeError when operands that are not single numbers are on different meshes.
    """
    same_shape = [index for index, spec in enumerate(operands) if spec.shape == shape]
    written = [index for index in same_shape if index in mutated]
    custom = [index for index in same_shape if has_custom(operands[index].placements)]
    leads = (written or custom or (same_shape if stock_may_lead else []))[:1]
    if not leads:
        return None
    if shape == () and len(operands) > 1 and not mutated and not stock_may_lead:
        return None  # one-element local tensors promote types unlike numbers
    leader = operands[leads[0]]
    for spec in operands:
        if spec.mesh != leader.mesh and math.prod(spec.shape) != 1:
            raise OpPlacementError(
                f"{name}: operands of shapes {tuple(leader.shape)} and {tuple(spec.shape)} are on different meshes "
                f"{leader.mesh} and {spec.mesh}; move them to one mesh by full_tensor() and distribute_tensor()"
            )
    target = tuple(
        placement
        if not _pending_on(axis, operands, shape)
        else _settle(name, axis, operands, shape, leads[0], bool(written))
        for axis, placement in enumerate(leader.placements)
    )
    alignment = Alignment(target, operands, shape)
    alignment.inputs = tuple(
        _keep_pending(name, index, spec, wanted, target, shape)
        for index, (spec, wanted) in enumerate(zip(operands, alignment.inputs))
    )
    return alignment


def _pending_on(axis: int, operands: Sequence[DTensorSpec], shape: torch.Size) -> bool:
    return any(
        spec.shape == shape and axis < spec.mesh.ndim and spec.placements[axis].is_partial() for spec in operands
    )


def _settle(
    name: str, axis: int, operands: Sequence[DTensorSpec], shape: torch.Size, leader: int, is_written: bool
) -> Placement:
    """The results' placement on an axis where an operand is Partial: that Partial if the op is linear in the operand, else
    Replicate (or the leader's own placement)."""
    found = [spec.placements[axis] if spec.shape == shape else Replicate() for spec in operands]
    own = found[leader]
    partials = [placement for placement in found if placement.is_partial()]
    first = partials[0]
    passes = False
    if is_pending(first, "sum", "avg"):
        if name in _ADDITIVE:  # with one operand, the other is a Python number: not to be added on every rank
            passes = len(found) > 1 and all(
                placement == first or _is_summand(first, placement, spec, shape)
                for placement, spec in zip(found, operands)
            )
            passes = passes and (own == first or not is_written)
        elif len(partials) == 1 and (name in _LINEAR_IN_FIRST or name in _LINEAR_IN_SECOND):
            passes = found.index(first) == 0 or name in _LINEAR_IN_SECOND
            passes = passes and all(p == first or p.is_replicate() for p in found)
        elif name in _UNARY_LINEAR:
            passes = True
    if name in _TRANSPARENT:
        passes = all(placement == first for placement in found)
    if passes:
        return first
    return Replicate() if own.is_partial() else own


def _is_summand(pending: Placement, own: Placement, spec: DTensorSpec, shape: torch.Size) -> bool:
    """Whether an operand can be one more contribution to a pending sum: a replicated one becomes that of the first rank."""
    return is_pending(pending, "sum") and own.is_replicate() and spec.shape == shape


def _keep_pending(
    name: str, index: int, spec: DTensorSpec, wanted: Placements, target: Placements, shape: torch.Size
) -> Placements:
    """A factor of a pending sum is not pending itself: it stays Replicate where the product is Partial."""
    if name not in _LINEAR_IN_FIRST or spec.shape != shape:
        return wanted
    return tuple(
        Replicate() if result.is_partial() and not own.is_partial() else placement
        for placement, result, own in zip(wanted, target, spec.placements)
    )


def _replicated(spec: DTensorSpec) -> Placements:
    return (Replicate(),) * spec.mesh.ndim


def _as_vector(local: torch.Tensor) -> torch.Tensor:
    return local.reshape(1)


def _expand_and_slice(
    mesh: DeviceMesh, shape: tuple[int, ...], placements: Placements, whole: torch.Tensor
) -> torch.Tensor:
    """This rank's part of a replicated tensor that is broadcast to ``shape``; nothing is communicated."""
    return move_local(whole.expand(shape), mesh, shape, [Replicate()] * mesh.ndim, without_partials(placements)).wait()


# Elementwise ops that torch does not tag as pointwise, by name.
_UNTAGGED = names(
    "copy_ fill_ zero_ detach detach_ alias _to_copy clone lift_fresh masked_fill masked_fill_ _conj _neg_view "
    "_conj_physical conj_physical abs_ copysign_ float_power polygamma_ xlogy_ __irshift__ __ilshift__ isneginf "
    "isposinf native_dropout_backward fill hardswish hardswish_ hardswish_backward softplus_backward elu_backward "
    "leaky_relu_backward hardtanh_backward hardsigmoid_backward mish_backward hardshrink_backward softshrink_backward"
)


def is_elementwise(op: Any) -> bool:
    """Whether each element of the results depends on the operands' elements at the same place only."""
    packet = op.overloadpacket
    name = packet.__name__
    if name in _UNTAGGED or torch.Tag.pointwise in op.tags:
        return True
    overload = op._overloadname
    if name.endswith("_") and not name.startswith("_"):  # the in-place form of a tagged op
        packet = getattr(torch.ops.aten, name[:-1], None)
    elif overload == "out" or "grad_input" in overload:
        overload = "default"
    elif overload.endswith("_out"):
        overload = overload.removesuffix("_out")
    functional = getattr(packet, overload, None) if packet is not None else None
    return functional is not None and torch.Tag.pointwise in functional.tags


def elementwise_rule(call: OpCall) -> Decision | None:
    """The operands are moved to the placements of the leader, see :func:`align`, which the result keeps.

    No communication when all operands have the same placements. Replicated operands are sliced. Operands that are
    broadcast are replicated, then expanded and sliced.
    """
    shape = torch.broadcast_shapes(*(spec.shape for spec in call.operands))
    alignment = align(call.name, call.operands, shape, call.mutated)
    if alignment is None:
        return None
    if alignment.broadcasts and not alignment.is_ragged:
        ragged = [ragged_axis(spec.placements) is not None for spec in call.operands]
        if has_custom(alignment.leader) and not any(ragged):
            return None  # an interleaved leader: see vescale/ops/interleaved.py
        inputs = tuple(
            wanted if is_ragged else spec.placements
            for spec, wanted, is_ragged in zip(call.operands, alignment.inputs, ragged)
        )
        return Decision(inputs, redispatch=True)
    num_results = 1 if isinstance(call.meta, TensorMeta) else len(call.meta)
    flat = alignment.is_ragged and call.kwargs.get("memory_format") is not None
    local = functools.partial(run_row_major, call.op) if flat else None
    return Decision(alignment.inputs, (alignment.leader,) * num_results, local, prepare=alignment.prepare)


def run_row_major(op: Any, local: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Flat local tensors have no other memory format."""
    result: torch.Tensor = op(local, *args, **{**kwargs, "memory_format": None})
    return result


register_family("elementwise", covers=is_elementwise, rule=elementwise_rule)

# Their derivatives are zeros that autograd makes by the sizes of a DTensor: plain tensors, which no op of DTensors takes.
_SIGNS: dict[Any, Any] = {
    torch.sgn: torch.sign,
    torch.Tensor.sgn: torch.Tensor.sign,
    torch.Tensor.sgn_: torch.Tensor.sign_,
}
_COMPARISONS: dict[Any, Any] = {
    getattr(torch.Tensor, f"{name}_"): getattr(torch, name)
    for name in names("eq ne lt gt le ge not_equal less greater less_equal greater_equal")
}


@replaces(*_SIGNS)
def _sgn(context: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``sign`` of real numbers, which has the same values."""
    x = args[0] if args else kwargs["input"]
    return (function if x.is_complex() else _SIGNS[function])(*args, **kwargs)


@replaces(*_COMPARISONS)
def _compare_in_place(context: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The comparison, copied to what it is written to."""
    flows = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
    if not (flows and isinstance(args[0], DTensor)):
        return function(*args, **kwargs)
    return args[0].copy_(_COMPARISONS[function](*args, **kwargs))


# Ops that return a Python value: ``equal``, ``allclose``, ``item``.


def compare_rule(call: OpCall) -> Decision | None:
    """The second operand is moved to the first one's placements, or the first to the second's if only those are custom.

    Communication: the move, and one byte of each rank for the common answer.
    """
    first, second = call.operands
    if first.shape != second.shape:
        if call.name == "allclose":
            return None
        return Decision((first.placements, second.placements), None, lambda *_, **__: False)
    target = without_partials((first if has_custom(first.placements) else second).placements)
    agree = functools.partial(_agreed, call.op, first.mesh, reduction_axes(target))
    return Decision((target, target), None, agree)


def _are_stock(op: Any, schema: Any) -> bool:
    return not any(has_custom(spec.placements) for spec in schema.args_schema)


@handles(torch.ops.aten.equal.default, applies=_are_stock)
def _equal(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Of placements that stock DTensor knows, by the ranks of the operands' mesh. Stock DTensor asks all ranks of the
    default process group, also those that run another stage of a pipeline, or are in no mesh of the model, and never answer.

    Communication: operands are moved to the second one's placements; and one byte of each rank, where ranks have parts.
    """
    first, second = args
    if first.shape != second.shape:
        return False
    target = without_partials(second.placements)
    own = (local_of(bring(x, target, "equal", name)) for x, name in ((first, "self"), (second, "other")))
    return _agreed(op, first.device_mesh, reduction_axes(target), *own, **kwargs)


def _agreed(op: Any, mesh: DeviceMesh, axes: tuple[int, ...], *args: Any, **kwargs: Any) -> bool:
    if not axes:
        return bool(op(*args, **kwargs))
    own = torch.tensor([op(*args, **kwargs)], device=args[0].device)
    return bool(gather_ranks(own, mesh, axes).all().item())


def item_rule(call: OpCall) -> Decision:
    """``item()`` gathers the tensor's one element."""
    return Decision(((Replicate(),) * call.mesh.ndim,), None)


register_aten("equal allclose", rule=compare_rule)
register_aten("_local_scalar_dense", rule=item_rule)


# Ops on lists of tensors, and fused optimizers: elementwise, one list index at a time.

_REDUCTIONS = names("_foreach_norm _foreach_max _foreach_powsum")
_FUSED = names("_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_")


def is_foreach(op: Any) -> bool:
    """Whether the op does the same elementwise computation on each index of lists of tensors."""
    name = op.overloadpacket.__name__
    return name in _FUSED or (name.startswith("_foreach_") and name not in _REDUCTIONS)


def is_listed(op: Any) -> bool:
    """Whether the op computes something of each index of lists of tensors, by itself."""
    name = op.overloadpacket.__name__
    return name in _FUSED or name.startswith("_foreach_")


def foreach_rule(call: OpCall) -> Decision | None:
    """Each index of the lists is one elementwise computation, aligned with :func:`align`: it follows the tensor that is
    written to, or the first one with a custom placement. Tensors outside of the lists, and one-element ones, are numbers.

    No communication when the operands have the same placements at each index. A fused optimizer's state that has other
    placements than its parameter (made from a gradient that had them) is moved there and back.
    """
    lists: dict[int, list[int]] = defaultdict(list)
    for operand, (argument, index) in enumerate(call.positions):
        if index is not None and call.argument_name(argument) != "state_steps":
            lists[index].append(operand)
    inputs: list[Placements] = [(Replicate(),) * spec.mesh.ndim for spec in call.operands]
    outputs: list[Placements] = []
    for _, operands in sorted(lists.items()):
        specs = [call.operands[operand] for operand in operands]
        written = [place for place, operand in enumerate(operands) if operand in call.mutated]
        alignment = align(call.name, specs, specs[0].shape, written, stock_may_lead=True)
        if alignment is None or alignment.broadcasts or alignment.prepare:
            return None
        for operand, placements in zip(operands, alignment.inputs):
            inputs[operand] = placements
        outputs.append(alignment.leader)
    scratch: tuple[int, ...] = ()
    if call.name in _FUSED:
        arguments = [call.argument_name(argument) for argument, _ in call.positions]
        scratch = tuple(operand for operand, name in enumerate(arguments) if name == "grads")
    return Decision(tuple(inputs), None if call.meta is None else tuple(outputs), scratch=scratch)


def _with_numbers(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op whose scalars are a tensor, one of each index: their values are needed before anything can be decided."""
    values = kwargs.get("scalars", args[-1])
    scalars = (values.full_tensor() if isinstance(values, DTensor) else values).tolist()
    return op.overloadpacket.ScalarList(*args[:3], scalars)


register_family("foreach", covers=is_foreach, rule=foreach_rule)
for _name in ("addcmul", "addcmul_", "addcdiv", "addcdiv_"):
    register(getattr(torch.ops.aten, f"_foreach_{_name}").Tensor, handler=_with_numbers, takes_plain=True)


# Losses that compare element by element (``mse_loss``, ``smooth_l1_loss``, ...) over sharded tensors. In forward each
# rank sums its elements, and one all-reduce of that number over the axes that shard them gives the sum, which ``mean``
# divides by the global count. Backward is local. Stock DTensor takes the mean of the ranks' means, which differs if
# shards are uneven, and divides some gradients by the local count. A plain operand is the same on every rank:
# ``F.mse_loss(model(x), y)`` with plain ``y`` works outside of the model.

_aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2


@dataclass(frozen=True)
class _Signature:
    """Positions of an op's arguments: the first ``num_operands`` are tensors, the reduction is at ``reduction``."""

    num_operands: int
    reduction: int
    backward: bool = False


def _run(signature: _Signature, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    arguments = op._schema.arguments
    values = [args[i] if i < len(args) else kwargs.get(a.name, a.default_value) for i, a in enumerate(arguments)]
    operands = values[: signature.num_operands]
    main = next(x for x in operands[signature.backward :] if isinstance(x, DTensor))
    mesh, reduction = main.device_mesh, values[signature.reduction]
    placements = without_partials(main.placements)
    shape = torch.broadcast_shapes(*(x.shape for x in operands[signature.backward :] if x is not None))

    def local(x: Any, name: str) -> Any:
        if x is None:
            return None
        if x.ndim == 0 and shape:  # the gradient of a reduced loss
            return local_of(bring(x, (Replicate(),) * mesh.ndim, str(op), name)) if isinstance(x, DTensor) else x
        if tuple(x.shape) != tuple(shape):
            x = x.expand(shape)
        if isinstance(x, DTensor):
            return local_of(bring(x, placements, str(op), name))
        tell_plain_value(op, name, x, mesh)
        return cut(x, mesh, placements)

    locals_ = [local(x, argument.name) for x, argument in zip(operands, arguments)]
    count = math.prod(shape)
    if signature.backward:
        if reduction == _MEAN:
            locals_[0] = locals_[0] / count
            reduction = _SUM
        result = op(*_replaced(values, locals_, signature, reduction))
    else:
        result = op(*_replaced(values, locals_, signature, _NONE if reduction != _SUM else _SUM))
        if reduction != _NONE:
            total = result.sum()
            axes = [a for a, p in enumerate(placements) if shard_dim(p) is not None and mesh.size(a) > 1]
            if axes:
                tell_read(main, "the loss")
                with requested_by(str(op)):
                    total = all_reduce(total, "sum", axis_group(mesh, axes).group).wait()
            total = total / count if reduction == _MEAN else total
            return make_dtensor(total, make_spec(mesh, (Replicate(),) * mesh.ndim, (), (), total.dtype))
    spec = make_spec(mesh, placements, shape, contiguous_stride(shape), result.dtype)
    return make_dtensor(result.contiguous(), spec)


def _replaced(values: list[Any], operands: list[Any], signature: _Signature, reduction: int) -> list[Any]:
    new = [*operands, *values[len(operands) :]]
    new[signature.reduction] = reduction
    return new


_SIGNATURES = {
    _aten.mse_loss.default: _Signature(2, 2),
    _aten.mse_loss_backward.default: _Signature(3, 3, backward=True),
    _aten.smooth_l1_loss.default: _Signature(2, 2),
    _aten.smooth_l1_loss_backward.default: _Signature(3, 3, backward=True),
    _aten.huber_loss.default: _Signature(2, 2),
    _aten.huber_loss_backward.default: _Signature(3, 3, backward=True),
    _aten.soft_margin_loss.default: _Signature(2, 2),
    _aten.soft_margin_loss_backward.default: _Signature(3, 3, backward=True),
    _aten.binary_cross_entropy.default: _Signature(3, 3),
    _aten.binary_cross_entropy_backward.default: _Signature(4, 4, backward=True),
    _aten.binary_cross_entropy_with_logits.default: _Signature(4, 4),
}
for _op, _signature in _SIGNATURES.items():
    handles(_op, applies=is_spread, takes_plain=True)(functools.partial(_run, _signature))


# Ops that are linear in a pending sum, and stay local: ``where`` on sums, ``index_put`` that accumulates, and
# derivatives of activation functions. Stock DTensor reduces a Partial operand of the first and the last, and gathers
# the sharded values of the second: the gradients of a mask's bias, of a table indexed with a sharded batch, and of what
# conditions a sharded sequence (timesteps and classes of a diffusion model).


def _has_partial(op: Any, schema: Any) -> bool:
    """Whether an operand is Partial on an axis."""
    specs = (x for x in schema.args_schema if isinstance(x, DTensorSpec))
    return any(p.is_partial() for spec in specs for p in spec.placements)


def part_of(x: torch.Tensor, mesh: DeviceMesh, target: Sequence[Placement], op: str, operand: str) -> torch.Tensor:
    """This rank's part of an operand; a plain tensor is the same on every rank."""
    if not isinstance(x, DTensor):
        spec = make_spec(mesh, (Replicate(),) * mesh.ndim, x.shape, x.stride(), x.dtype)
        x = make_dtensor(x, spec)
    return local_of(bring(x, target, op, operand))


def row_major(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    return make_dtensor(local, make_spec(mesh, placements, shape, contiguous_stride(shape), local.dtype))


# Linear in the gradient, their first operand, which has the shape of all others. Stock DTensor has rules for these ...
_DERIVATIVES = frozenset(
    f"aten::{name}_backward" for name in names("gelu logit native_dropout sigmoid silu tanh threshold")
)


# ... and none for these, or (softplus) one that gets the order of the result's dims in memory wrong, so that views fail.
_UNRULED = names("elu hardshrink hardsigmoid hardswish hardtanh leaky_relu mish softplus softshrink")


def derivative_of_sum(schema: Any, sharding: OutputSharding) -> OutputSharding | None:
    """The placements of the derivative of an activation function for a gradient that is a pending sum: it is one, too, if
    the other operands are replicated. None for other calls and other placements of the operands."""
    grad = schema.args_schema[0]
    if schema.op._schema.name not in _DERIVATIVES or not isinstance(grad, DTensorSpec):
        return None
    others = [spec for spec in schema.args_schema[1:] if isinstance(spec, DTensorSpec)]
    for axis, own in enumerate(grad.placements):
        linear = is_pending(own, "sum", "avg")
        if (own.is_partial() and not linear) or any(
            spec.placements[axis] != (Replicate() if linear else own) for spec in others
        ):
            return None
    result: Any = sharding.output_spec
    return OutputSharding(DTensorSpec(grad.mesh, grad.placements, tensor_meta=result.tensor_meta))


@handles(*(getattr(_aten, f"{name}_backward").default for name in _UNRULED), takes_plain=True)
def _unruled_derivative(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """The derivative of an activation function of elements, as in :func:`derivative_of_sum`; other operands are moved to
    the placements of the first one, the activation's input."""
    grad, *others = (x for x in args if isinstance(x, torch.Tensor))
    mesh = next(x for x in (grad, *others) if isinstance(x, DTensor)).device_mesh
    own = others[0].placements if isinstance(others[0], DTensor) else (Replicate(),) * mesh.ndim
    arriving = grad.placements if isinstance(grad, DTensor) else (Replicate(),) * mesh.ndim
    target = [
        g if p.is_replicate() and is_pending(g, "sum", "avg") else r
        for g, p, r in zip(arriving, own, without_partials(own))
    ]
    wanted = {id(x): [t if x is grad or not t.is_partial() else Replicate() for t in target] for x in (grad, *others)}
    local = op(*(part_of(x, mesh, wanted[id(x)], str(op), "operand") if id(x) in wanted else x for x in args), **kwargs)
    return make_dtensor(local, make_spec(mesh, target, grad.shape, stride_like(local, grad.shape), local.dtype))


def _raises_what_is_below(op: Any, schema: Any) -> bool:
    """Whether what is below a threshold gets a value above it, in a pending extremum."""
    x, threshold, value = schema.args_schema[:3]
    return bool(value > threshold) and any(is_pending(p, "max", "min") for p in x.placements)


@handles(_aten.threshold.default, _aten.threshold_.default, applies=_raises_what_is_below)
def _threshold(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of the value. PyTorch's rule, which takes every threshold for non-decreasing, keeps a pending extremum."""
    x, *numbers = args
    found = _aten.threshold.default(bring(x, without_partials(x.placements), str(op), "self"), *numbers)
    if op is _aten.threshold.default:
        return found
    write_back(x, local_of(found), spec_of(found))
    return x


@handles(_aten.where.self, applies=_has_partial)
def _where(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``where(condition, x, y)`` is linear in x and y: with a pending sum among them, each rank chooses in its summand."""
    operands = [x for x in args if isinstance(x, DTensor)]
    if len(args) != 3 or not any(is_pending(p, "sum") for x in operands for p in x.placements):
        return stock_dispatch(op, args, kwargs)
    mesh = operands[0].device_mesh
    shape = torch.broadcast_shapes(*(x.shape for x in args))
    out = [_where_placement(args, axis, shape) for axis in range(mesh.ndim)]
    if any(placement is None for placement in out):
        return stock_dispatch(op, args, kwargs)
    parts = []
    for position, x in enumerate(args):
        target = [_of_operand(x, placement, shape, position > 0) for placement in out if placement is not None]
        parts.append(part_of(x, mesh, target, str(op), op._schema.arguments[position].name))
    return row_major(op(*parts), mesh, [p for p in out if p is not None], shape)


def _where_placement(args: Sequence[torch.Tensor], axis: int, shape: Sequence[int]) -> Placement | None:
    """The placement of the result on an axis; None if those of its operands differ."""
    found: set[Placement] = set()
    for position, x in enumerate(args):
        own = x.placements[axis] if isinstance(x, DTensor) else Replicate()
        if own.is_replicate():
            continue
        if type(own) is Shard:
            found.add(Shard(own.dim - x.ndim + len(shape)))
        elif is_pending(own, "sum") and position:
            found.add(Partial())
        else:
            return None
    return found.pop() if len(found) == 1 else None if found else Replicate()


def _of_operand(x: torch.Tensor, out: Placement, shape: Sequence[int], summed: bool) -> Placement:
    """What an operand must be for a result that is ``out``, as broadcasting goes."""
    if out.is_partial():
        return out if summed else Replicate()
    if isinstance(out, Shard):
        dim = out.dim - len(shape) + x.ndim
        return Shard(dim) if dim >= 0 and x.shape[dim] == shape[out.dim] else Replicate()
    return out


@handles(_aten.fill_.Scalar, applies=_has_partial)
@handles(_aten.fill_.Tensor, takes_plain=True)
def _fill(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.fill_(number)``, what ``x[index] = number`` comes to, too. On a Partial x, one rank holds the value."""
    x, value = args
    if isinstance(value, DTensor):
        value = local_of(bring(value, (Replicate(),) * value.device_mesh.ndim, str(op), "value"))
    if not isinstance(x, DTensor):
        return op(x, value)
    local_of(x).fill_(value)
    coordinate = x.device_mesh.get_coordinate() or ()
    if any(p.is_partial() and not is_pending(p, "sum", "avg", "max", "min") for p in x.placements):
        whole = [Replicate() if p.is_partial() else p for p in x.placements]
        write_back(x, local_of(x), make_spec(x.device_mesh, whole, x.shape, x.stride(), x.dtype))
        return x
    if any(is_pending(p, "sum") and index for p, index in zip(x.placements, coordinate)):
        local_of(x).zero_()
    return x


@handles(_aten.clone.default, applies=_has_partial)
def _clone(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OutputSharding:
    """A copy of each rank's part; stock DTensor reduces a Partial tensor to copy it."""
    spec = spec_of(args[0])
    meta: Any = output_meta(op, (spec,), kwargs, None)
    return OutputSharding(make_spec(spec.mesh, spec.placements, meta.shape, meta.stride, meta.dtype))


@handles(_aten.masked_fill_.Scalar, applies=_has_partial)
def _masked_fill(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Zeros may be filled into a pending sum: on every rank. (Label smoothing does, over sharded classes.)"""
    x, mask, value = args
    pending = [is_pending(p, "sum", "avg") for p in x.placements] if isinstance(x, DTensor) else []
    if not any(pending) or value != 0 or not isinstance(mask, DTensor) or mask.shape != x.shape:
        return stock_dispatch(op, args, kwargs)
    wanted = [Replicate() if reduced_later else p for reduced_later, p in zip(pending, x.placements)]
    local_of(x).masked_fill_(local_of(bring(mask, wanted, str(op), "mask")), value)
    return x


@replaces(torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
def _to_python(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with no_torch_function():
        tell_read(args[0], f"{func.__name__}()", for_python=True)
        whole = local_of(bring(args[0], context.replicated, func.__name__, "self"))
        return read_only(args[0], func(whole, *args[1:], **kwargs))
