"""Norms: layer and RMS normalization over sharded dims, the backward of group normalization over a sharded batch (stock
DTensor passes the global batch size to the kernel), and vector norms over sharded dims."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import (
    local_of,
    make_dtensor,
    make_spec,
    no_torch_function,
    some_rank_holds_nothing,
    spec_of,
    stock_dispatch,
)
from vescale.ops._context import OpContext
from vescale.ops._conversion import bring, bring_with_gradient, convert, enter_local, leave_local, whole
from vescale.ops._observer import has_model, running_module
from vescale.ops._registration import handles, replaces
from vescale.ops._registry import When
from vescale.ops._row_reductions import dims_of, reduces_a_shard
from vescale.placements import contiguous_stride, shard_dim, without_partials

__all__ = ["normalizes_locally"]

_aten = torch.ops.aten
_SIGNATURES = {
    "layer_norm": inspect.Signature.from_callable(F.layer_norm),
    "rms_norm": inspect.Signature.from_callable(F.rms_norm),
}


@replaces(
    F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm, when=When.NOT_REPLICATE, communicates=("all_reduce",)
)
def _normalization(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``layer_norm`` and ``rms_norm``.

    Over a sharded dim each statistic (mean and variance, or mean square) is one all-reduce of a number a row, and so is its
    gradient; nothing is gathered. No plan could place these statistics otherwise: they do not count as implicit. Elsewhere
    rows are independent and normalized locally, also where some ranks have none, for which DTensor's rule would gather.
    """
    x = args[0] if args else kwargs["input"]
    if not isinstance(x, DTensor) or not all(type(p) is Shard or p.is_replicate() for p in x.placements):
        return func(*args, **kwargs)
    shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    first = x.ndim - (1 if isinstance(shape, int) else len(shape))
    cuts = [shard_dim(placement) for placement in x.placements]
    if not normalizes_locally(x.shape, first, cuts, context.mesh.shape):
        return func(*args, **kwargs)
    if func is torch.layer_norm:
        args, kwargs = args[:5], {name: value for name, value in kwargs.items() if name != "cudnn_enable"}
    given = _SIGNATURES[func.__name__].bind(*args, **kwargs)
    given.apply_defaults()
    weight, bias, eps = (given.arguments.get(name) for name in ("weight", "bias", "eps"))
    if any(dim is not None and dim >= first for dim in cuts):
        return _over_shards(func.__name__, x, first, weight, bias, eps)
    return _of_rows(func, x, first, weight, bias, eps)


def normalizes_locally(shape: Sequence[int], first: int, cuts: Sequence[int | None], num_ranks: Sequence[int]) -> bool:
    """Whether a norm over the dims of ``shape`` from ``first`` on runs on local tensors, and not by DTensor's rule. The
    gradient of its result is then brought to the placements of the input, and summed before it is used.

    Args:
        cuts: for each axis of the mesh, the dim of the input that is cut along it.
        num_ranks: of each axis.
    """
    return any(dim is not None and (dim >= first or shape[dim] < n) for dim, n in zip(cuts, num_ranks))


def _over_shards(name: str, x: DTensor, first: int, weight: Any, bias: Any, eps: float | None) -> torch.Tensor:
    """Computed on local tensors: DTensor's elementwise rules gather dims that are smaller than the number of ranks."""
    mesh, dtype = x.device_mesh, x.dtype
    dims, size = list(range(first, x.ndim)), x.shape[first:].numel()
    features = [(dim - first if (dim := shard_dim(p)) is not None and dim >= first else None) for p in x.placements]
    pending = [p if dim is None else Partial() for p, dim in zip(x.placements, features)]

    def mean(values: torch.Tensor) -> torch.Tensor:
        total = values.sum(dims, keepdim=True) / size
        summed = leave_local(total, mesh, pending, (*x.shape[:first], *(1 for _ in dims)), name)
        return enter_local(convert(summed, without_partials(pending), requester=f"{name}: statistic"), pending)

    def factor(given: DTensor) -> torch.Tensor:
        own = [Replicate() if dim is None else Shard(dim) for dim in features]
        grads = [Partial() if type(p) is Shard and dim is None else o for p, o, dim in zip(x.placements, own, features)]
        return enter_local(bring_with_gradient(given, own, name, "weight"), grads)

    local = enter_local(x)
    with no_torch_function():
        local = local.float() if dtype in (torch.float16, torch.bfloat16) else local
        if name == "layer_norm":
            local = local - mean(local)
        eps = torch.finfo(dtype).eps if eps is None else eps
        local = (local * (mean(local.square()) + eps).rsqrt()).to(dtype)
        if weight is not None:
            local = local * factor(weight)
        if bias is not None:
            local = local + factor(bias)
        return leave_local(local, mesh, x.placements, x.shape, name)


def _of_rows(func: Any, x: DTensor, first: int, weight: Any, bias: Any, eps: float | None) -> torch.Tensor:
    summed = [Replicate() if placement.is_replicate() else Partial() for placement in x.placements]
    whole, name = [Replicate()] * x.device_mesh.ndim, func.__name__
    factors = [
        None if factor is None else enter_local(bring_with_gradient(factor, whole, name, "weight"), summed)
        for factor in (weight, bias)
    ]
    with no_torch_function():
        factors = factors if name == "layer_norm" else factors[:1]
        local = func(enter_local(x), list(x.shape[first:]), *factors, eps)
        return leave_local(local, x.device_mesh, x.placements, x.shape, name)


@handles(_aten.native_group_norm_backward.default)
def _group_norm_backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Rows are independent: only the gradients of weight and bias are Partial.

    Stock DTensor's decision is wrong for a sharded batch, and raises where not all three gradients are wanted.
    """
    grad, x, mean, rstd, weight, _, channels, area, groups, wanted = args
    mesh = x.device_mesh
    rows: list[Placement] = [p if shard_dim(p) == 0 else Replicate() for p in x.placements]
    summed: list[Placement] = [Partial() if shard_dim(p) == 0 else p for p in rows]
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


def _reduces_a_shard(op: Any, schema: Any) -> bool:
    """Whether ``linalg_vector_norm(x, ord, dim, ...)`` reduces a dim that is not whole on every rank."""
    return reduces_a_shard(schema.args_schema[0], dims_of(schema, 2))


@handles(
    _aten.linalg_vector_norm.default,
    _aten.norm.Scalar,
    _aten.norm.ScalarOpt_dim,
    _aten.norm.ScalarOpt_dim_dtype,
    _aten.norm.ScalarOpt_dtype,
    applies=_reduces_a_shard,
    communicates=("all_reduce",),
)
def _vector_norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reduce a norm over a sharded dim at once, inside a model and outside of it on a mesh of one: other ops (``sum``, also
    PyTorch's own) take DTensor's pending norm for a pending sum."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    if math.isinf(order or 0) and some_rank_holds_nothing(spec_of(args[0])):  # its kernel takes no empty tensor
        args = (whole(args[0], str(op)), *args[1:])
    found = stock_dispatch(op, args, kwargs)
    if not isinstance(found, DTensor) or all(type(p) is Partial or not p.is_partial() for p in found.placements):
        return found
    if running_module() is None and not has_model(found.device_mesh):
        return found
    return bring(found, without_partials(found.placements), str(op), "result")
