"""Ops that are linear in a pending sum, and stay local: ``where`` on sums, ``index_put`` that accumulates, and derivatives
of activation functions.

Stock DTensor reduces a Partial operand of the first and the last, and gathers the sharded values of the second: the
gradients of a mask's bias, of a table indexed with a sharded batch, and of what conditions a sharded sequence (timesteps and
classes of a diffusion model).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import (
    DTensorSpec,
    OutputSharding,
    local_of,
    make_dtensor,
    make_spec,
    no_torch_function,
    stock_dispatch,
)
from vescale.ops import bring
from vescale.placements import contiguous_stride, is_pending, stride_like, without_partials

__all__ = ["DERIVATIVE_HANDLERS", "accumulated", "derivative", "where"]

# Linear in the gradient, their first operand, which has the shape of all others. Stock DTensor has rules for these ...
_DERIVATIVES = frozenset(
    f"aten::{name}_backward" for name in ("gelu", "logit", "native_dropout", "sigmoid", "silu", "tanh", "threshold")
)


# ... and none for these, or (softplus) one that gets the order of the result's dims in memory wrong, so that views fail.
_UNRULED = "elu hardshrink hardsigmoid hardswish hardtanh leaky_relu mish softplus softshrink"


def derivative(op: Any, schema: Any, stock: OutputSharding) -> OutputSharding | None:
    """The placements of the derivative of an activation function for a gradient that is a pending sum: it is one, too, if
    the other operands are replicated. None for other calls and other placements of the operands."""
    grad = schema.args_schema[0]
    if op._schema.name not in _DERIVATIVES or not isinstance(grad, DTensorSpec):
        return None
    others = [spec for spec in schema.args_schema[1:] if isinstance(spec, DTensorSpec)]
    for axis, own in enumerate(grad.placements):
        linear = is_pending(own, "sum", "avg")
        if any(spec.placements[axis] != (Replicate() if linear else own) for spec in others):
            return None
    result: Any = stock.output_spec
    return OutputSharding(DTensorSpec(grad.mesh, grad.placements, tensor_meta=result.tensor_meta))


def _unruled_derivative(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """The derivative of an activation function of elements, as in :func:`derivative`; other operands are redistributed to
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
    with no_torch_function():
        local = op(
            *(_part(x, mesh, wanted[id(x)], str(op), "operand") if id(x) in wanted else x for x in args), **kwargs
        )
        spec = make_spec(mesh, target, grad.shape, stride_like(local, grad.shape), local.dtype)
        return make_dtensor(local, spec)


DERIVATIVE_HANDLERS = {
    getattr(torch.ops.aten, f"{name}_backward").default: _unruled_derivative for name in _UNRULED.split()
}


def where(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``where(condition, x, y)`` is linear in x and y: with a pending sum among them, each rank chooses in its summand."""
    operands = [x for x in args if isinstance(x, DTensor)]
    if len(args) != 3 or not any(is_pending(p, "sum") for x in operands for p in x.placements):
        return stock_dispatch(op, args, kwargs)
    mesh = operands[0].device_mesh
    shape = torch.broadcast_shapes(*(x.shape for x in args))
    out = [_where_placement(args, axis, shape) for axis in range(mesh.ndim)]
    if any(placement is None for placement in out):
        return stock_dispatch(op, args, kwargs)
    with no_torch_function():
        parts = []
        for position, x in enumerate(args):
            target = [_of_operand(x, placement, shape, position > 0) for placement in out if placement is not None]
            parts.append(_part(x, mesh, target, str(op), op._schema.arguments[position].name))
        return _made(op(*parts), mesh, [p for p in out if p is not None], shape)


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


def accumulated(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor | None:
    """``x.index_put(indices, values, accumulate=True)``: the values that each rank adds are a term of a sum; values that
    are sharded on a dim that is not indexed shard the result. None for other calls and other placements of the operands."""
    x, indices, values = args[:3]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    plain = not isinstance(values, DTensor) or any(index is None for index in indices)
    if op is not torch.ops.aten.index_put.default or not accumulate or plain:
        return None
    if all(p.is_replicate() for p in values.placements):
        return None
    mesh, num_indexed = values.device_mesh, len(indices)
    num_leading = max(index.ndim for index in indices)
    if values.ndim != num_leading + x.ndim - num_indexed:
        return None  # values that are broadcast
    out: list[Placement] = []
    for axis, own in enumerate(values.placements):
        placed = x.placements[axis] if isinstance(x, DTensor) else Replicate()
        if own.is_replicate() and placed.is_replicate():
            out.append(Replicate())
        elif is_pending(own, "sum") or (type(own) is Shard and own.dim < num_leading):
            out.append(Partial())
        elif type(own) is Shard:
            out.append(Shard(own.dim - num_leading + num_indexed))
        else:
            return None
        if placed not in (Replicate(), out[-1]):
            return None

    def of_index(index: torch.Tensor) -> list[Placement]:
        found: list[Placement] = []
        for own in values.placements:
            dim = own.dim - num_leading + index.ndim if type(own) is Shard and own.dim < num_leading else -1
            is_cut = dim >= 0 and type(own) is Shard and index.shape[dim] == values.shape[own.dim]
            found.append(Shard(dim) if is_cut else Replicate())
        return found

    with no_torch_function():
        local = _part(x, mesh, out, str(op), "self")
        chosen = [_part(index, mesh, of_index(index), str(op), "indices") for index in indices]
        return _made(op(local, chosen, local_of(values), True), mesh, out, x.shape)


def _part(x: torch.Tensor, mesh: DeviceMesh, target: Sequence[Placement], op: str, operand: str) -> torch.Tensor:
    """This rank's part of an operand; a plain tensor is the same on every rank."""
    if not isinstance(x, DTensor):
        spec = make_spec(mesh, (Replicate(),) * mesh.ndim, x.shape, x.stride(), x.dtype)
        x = make_dtensor(x, spec)
    return local_of(bring(x, target, op, operand))


def _made(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    return make_dtensor(local, make_spec(mesh, placements, shape, contiguous_stride(shape), local.dtype))
