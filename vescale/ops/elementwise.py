"""Elementwise ops: they run on the local tensors after all operands were moved to the placements of one of them."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from vescale.comm import all_reduce, axis_group, requested_by
from vescale.compat import TensorMeta, local_of, make_dtensor, make_spec, tell_plain_value, tell_read
from vescale.ops._alignment import align
from vescale.ops._call import OpCall, Placements, names
from vescale.ops._combine_ranks import gather_ranks, reduction_axes
from vescale.ops._conversion import bring
from vescale.ops._conversion_plans import cut
from vescale.ops._decision import Decision
from vescale.ops._registry import handles, is_spread, register, register_aten, register_family, replaces
from vescale.placements import contiguous_stride, has_custom, ragged_axis, shard_dim, without_partials

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
