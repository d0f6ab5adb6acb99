"""Elementwise ops: they run on the local tensors after all operands were moved to the placements of one of them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale.compat import TensorMeta
from vescale.ops._alignment import align
from vescale.ops._call import OpCall, names
from vescale.ops._decision import Decision
from vescale.ops._registration import replaces
from vescale.ops._registry import register_family
from vescale.placements import has_custom, ragged_axis

__all__ = ["is_elementwise", "run_row_major"]

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
