"""Losses that compare element by element (``mse_loss``, ``smooth_l1_loss``, ...) over sharded tensors.

In forward each rank sums its elements, and one all-reduce of that number over the axes that shard them gives the sum, which
``mean`` divides by the global count. Backward is local. Stock DTensor takes the mean of the ranks' means, which differs if
shards are uneven, and divides some gradients by the local count.

A plain operand is the same on every rank: ``F.mse_loss(model(x), y)`` with plain ``y`` works outside of the model.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale.comm import all_reduce, axis_group, requested_by
from vescale.compat import local_of, make_dtensor, make_spec, tell_plain_value, tell_read
from vescale.ops._conversion import bring
from vescale.ops._conversion_plans import cut
from vescale.ops._registration import handles, is_spread
from vescale.placements import contiguous_stride, shard_dim, without_partials

__all__: list[str] = []

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
    _kinds = () if _signature.backward else ("all_reduce",)
    handles(_op, applies=is_spread, takes_plain=True, communicates=_kinds)(functools.partial(_run, _signature))
