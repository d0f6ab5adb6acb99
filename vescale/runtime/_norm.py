"""Norms: group normalization's backward over a sharded batch, where stock DTensor passes the kernel the global batch size,
and vector norms over sharded dims."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import local_of, make_dtensor, make_spec, no_torch_function, stock_dispatch
from vescale.placements import shard_dim
from vescale.runtime._boundary import bring, contiguous_stride, reduced
from vescale.runtime._runtime import locate

__all__ = ["NORM_HANDLERS"]

_aten = torch.ops.aten


def _group_norm_backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """``native_group_norm_backward``; rows are independent, so that only the weights' gradients are Partial."""
    grad, x, mean, rstd, weight, _, channels, area, groups, wanted = args
    mesh = x.device_mesh
    rows: list[Placement] = [p if shard_dim(p) == 0 else Replicate() for p in x.placements]
    summed: list[Placement] = [Partial() if shard_dim(p) == 0 else p for p in rows]
    with no_torch_function():
        operands = [("grad_out", grad), ("input", x), ("mean", mean), ("rstd", rstd)]
        grad, local, mean, rstd = (local_of(bring(value, rows, str(op), name)) for name, value in operands)
        if isinstance(weight, DTensor):
            weight = local_of(bring(weight, [Replicate()] * mesh.ndim, str(op), "weight"))
        found = op(
            grad.contiguous(), local.contiguous(), mean, rstd, weight, local.shape[0], channels, area, groups, wanted
        )
        shapes = [(tuple(x.shape), rows), ((channels,), summed), ((channels,), summed)]
        return tuple(
            None
            if part is None
            else make_dtensor(part, make_spec(mesh, placements, shape, contiguous_stride(shape), part.dtype))
            for part, (shape, placements) in zip(found, shapes)
        )


def _vector_norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Inside a model, a norm over a sharded dim is reduced at once: ops take DTensor's pending norm for a pending sum."""
    found = stock_dispatch(op, args, kwargs)
    if isinstance(found, DTensor) and any(p.is_partial() and type(p) is not Partial for p in found.placements):
        return bring(found, reduced(found.placements), str(op), "result") if locate() is not None else found
    return found


NORM_HANDLERS = {
    _aten.linalg_vector_norm.default: _vector_norm,
    _aten.native_group_norm_backward.default: _group_norm_backward,
}
