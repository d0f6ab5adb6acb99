"""Norms: layer and RMS normalization over sharded dims, the backward of group normalization over a sharded batch (stock
DTensor passes the global batch size to the kernel), and vector norms over sharded dims."""

from __future__ import annotations

import functools
import inspect
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import all_gather_into, all_reduce, axis_group, requested_by
from vescale.compat import (
    DTensorSpec,
    TensorMeta,
    local_of,
    make_dtensor,
    make_spec,
    no_torch_function,
    note_writes,
    some_rank_holds_nothing,
    spec_of,
    stock_dispatch,
)
from vescale.ops._call import Decision, OpCall
from vescale.ops._conversion import (
    bring,
    bring_with_gradient,
    convert,
    differentiable_once,
    enter_local,
    leave_local,
    whole,
)
from vescale.ops._observer import has_model, running_module
from vescale.ops._registry import OpContext, When, handles, register_aten, replaces
from vescale.ops.reductions import (
    accumulation_dtype,
    add_ranks,
    dims_of,
    gather_ranks,
    neutral_extremum,
    reduces_a_shard,
    reduces_everything,
    reduction_axes,
    row_reduction,
)
from vescale.placements import contiguous_stride, shard_dim, without_partials

_aten = torch.ops.aten
_SIGNATURES = {
    "layer_norm": inspect.Signature.from_callable(F.layer_norm),
    "rms_norm": inspect.Signature.from_callable(F.rms_norm),
}


@replaces(F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm, when=When.NOT_REPLICATE)
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
    if not _normalizes_locally(x.shape, first, cuts, context.mesh.shape):
        return func(*args, **kwargs)
    if func is torch.layer_norm:
        args, kwargs = args[:5], {name: value for name, value in kwargs.items() if name != "cudnn_enable"}
    given = _SIGNATURES[func.__name__].bind(*args, **kwargs)
    given.apply_defaults()
    weight, bias, eps = (given.arguments.get(name) for name in ("weight", "bias", "eps"))
    if any(dim is not None and dim >= first for dim in cuts):
        return _over_shards(func.__name__, x, first, weight, bias, eps)
    return _of_rows(func, x, first, weight, bias, eps)


def _normalizes_locally(shape: Sequence[int], first: int, cuts: Sequence[int | None], num_ranks: Sequence[int]) -> bool:
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


# Vector norms of whole tensors, of every order.

# How a tensor's local part is reduced: (mesh, axes along which the parts differ).
_Scope = tuple[DeviceMesh, tuple[int, ...]]


def norm_rule(call: OpCall) -> Decision | None:
    """``linalg.vector_norm`` and ``norm`` over all dims; empty local tensors contribute nothing. Replicate.

    Communication: one value of each rank. Over some dims only: see :func:`row_reduction`.
    """
    if call.mutated or not reduces_everything(call):
        return row_reduction(call)
    order = call.argument("ord", call.argument("p", 2))
    spec, inputs = call.operands[0], without_partials(call.operands[0].placements)
    if not _has_norm(spec.shape, _order(order)):
        return None
    call.try_out()
    scope = (spec.mesh, reduction_axes(inputs))
    norms = functools.partial(_norms, _order(order), (scope,), (call.meta,), call.name == "linalg__powsum")
    return Decision((inputs,), ((Replicate(),) * spec.mesh.ndim,), lambda local, *_, **__: norms([local])[0])


def foreach_norm_rule(call: OpCall) -> Decision | None:
    """Reductions of each tensor of a list in which any tensor has one of our placements. Replicate.

    Communication: one value of each rank and tensor, in one collective for all tensors reduced over the same axes.
    """
    order = math.inf if call.name == "_foreach_max" else _order(call.argument("ord", 2))
    if not all(_has_norm(spec.shape, order) for spec in call.operands):
        return None
    call.try_out()
    inputs = tuple(without_partials(spec.placements) for spec in call.operands)
    scopes = tuple((spec.mesh, reduction_axes(placements)) for spec, placements in zip(call.operands, inputs))
    outputs = tuple((Replicate(),) * spec.mesh.ndim for spec in call.operands)
    if call.name == "_foreach_max":
        maxima = functools.partial(_combined, "max", scopes)
        return Decision(inputs, outputs, lambda locals_: maxima([_largest(local) for local in locals_]))
    norms = functools.partial(_norms, order, scopes, tuple(call.meta), call.name == "_foreach_powsum")
    return Decision(inputs, outputs, lambda locals_, *_, **__: norms(locals_))


def _order(order: Any) -> float:
    return 2.0 if order is None else float(order)  # "inf" and "-inf" are numbers too


def _has_norm(shape: Sequence[int], order: float) -> bool:
    """Whether a tensor of ``shape`` has a norm of this order here. For empty tensors PyTorch decides: 0 or an error."""
    return math.prod(shape) > 0 or 0 <= order < math.inf


def _norms(
    order: float, scopes: Sequence[_Scope], metas: Sequence[TensorMeta], powers: bool, locals_: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The norms of the tensors whose parts are ``locals_``; with ``powers`` the sums of powers, without the root."""
    how = "max" if order == math.inf and not powers else "min" if order == -math.inf and not powers else "sum"
    parts = [
        _part(local.to(accumulation_dtype(torch.promote_types(local.dtype, meta.dtype))), order, powers)
        for local, meta in zip(locals_, metas)
    ]
    results = []
    for value, meta in zip(_combined(how, scopes, parts), metas):
        if how == "sum" and not powers and order != 0:
            value = value.sqrt() if order == 2 else value.pow(1 / order)
        results.append(value.to(meta.dtype).view(meta.shape))
    return results


def _part(local: torch.Tensor, order: float, powers: bool) -> torch.Tensor:
    """What one rank contributes to a norm: a sum of powers, or an extremum of absolute values."""
    if order == 0:
        return (local != 0).sum().to(local.abs().dtype)
    if powers:
        return local.abs().pow(order).sum()
    if math.isinf(order):
        if local.numel() == 0:
            return local.abs().new_full((), 0.0 if order > 0 else math.inf)
        return local.abs().amax() if order > 0 else local.abs().amin()
    if local.numel() == 0:
        return local.abs().sum()
    norm: torch.Tensor = torch.linalg.vector_norm(local, order)
    return norm.square() if order == 2 else norm.pow(order)


def _largest(local: torch.Tensor) -> torch.Tensor:
    return local.amax() if local.numel() else neutral_extremum(local, largest=True)


def _combined(how: str, scopes: Sequence[_Scope], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts combined over the ranks; one collective for all parts with the same scope and dtype."""
    together: dict[Any, list[int]] = defaultdict(list)
    for index, (scope, part) in enumerate(zip(scopes, parts)):
        together[*scope, part.dtype].append(index)
    found: list[torch.Tensor] = list(parts)
    for (mesh, axes, _), indices in together.items():
        values = torch.stack([parts[index] for index in indices])
        if how == "sum":
            values = add_ranks(values, mesh, axes)
        else:
            rows = gather_ranks(values, mesh, axes)
            values = rows.amax(0) if how == "max" else rows.amin(0)
        for index, value in zip(indices, values.unbind()):
            found[index] = value
    return found


def _lacks_elements(op: Any, schema: Any) -> bool:
    """Whether a rank has no element of a tensor whose extremum is searched."""
    order = math.inf if op is _aten._foreach_max.default else _order((*schema.args_schema[1:], 2)[0])
    return math.isinf(order) and any(
        isinstance(spec, DTensorSpec) and some_rank_holds_nothing(spec) for spec in schema.args_schema[0]
    )


@handles(_aten._foreach_norm.Scalar, _aten._foreach_max.default, applies=_lacks_elements)
def _foreach_extremum(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of tensors with fewer rows than ranks: of all rows on every rank."""
    tensors = [whole(x, str(op)) if some_rank_holds_nothing(spec_of(x)) else x for x in args[0]]
    return op(tensors, *args[1:], **kwargs)


def _is_pending(op: Any, schema: Any) -> bool:
    x = schema.args_schema[0]
    specs = x if isinstance(x, list | tuple) else [x]
    return any(isinstance(spec, DTensorSpec) and any(p.is_partial() for p in spec.placements) for spec in specs)


@handles(_aten.linalg__powsum.default, _aten._foreach_powsum.Scalar, applies=_is_pending)
def _powers(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of the value. PyTorch's rule adds up the powers of the terms of a pending sum."""
    x = args[0]
    values = [
        bring(each, without_partials(each.placements), str(op), "self")
        for each in (x if isinstance(x, list | tuple) else [x])
    ]
    return op(values if isinstance(x, list | tuple) else values[0], *args[1:], **kwargs)


register_aten("linalg_vector_norm norm linalg__powsum", rule=norm_rule)
register_aten(
    "_foreach_norm _foreach_powsum _foreach_max",
    rule=foreach_norm_rule,
)


@replaces(torch.linalg.pinv)
def _pinv(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same with whole tolerances. PyTorch's dispatcher moves no keyword operands of the op, and does not look at their
    placements: each rank would take its part or term of them for all."""

    def whole(value: Any, name: str) -> Any:
        if not isinstance(value, DTensor):
            return value
        tolerance: DTensor = value.detach()  # type: ignore[assignment]
        return bring(tolerance, (Replicate(),) * value.device_mesh.ndim, "linalg.pinv", name)

    others = [whole(value, "rcond") for value in args[1:]]
    return func(*args[:1], *others, **{k: v if k in ("A", "input") else whole(v, k) for k, v in kwargs.items()})


def _is_column_major(_: Any, schema: Any) -> bool:
    """Whether the matrices of the first operand are not row-major, by the strides of the whole tensor."""
    spec = schema.args_schema[0]
    whole = torch.empty_strided(spec.shape, spec.stride, dtype=spec.tensor_meta.dtype, device="meta")
    return not (whole.is_complex() or whole.is_contiguous())


@handles(_aten._linalg_det.default, _aten._linalg_slogdet.default, applies=_is_column_major)
def _determinant(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of the transposed matrices, row-major. PyTorch factors the transpose of a row-major matrix, and its derivative goes by
    the strides of the whole tensor; each rank's part may have others."""
    (matrices,) = args
    return op(matrices.mT.clone(memory_format=torch.contiguous_format), **kwargs)


# Batch normalization over a sharded batch: statistics of the whole batch, as one device computes them.
#
# ====================  =====================================================================================================
# moment                communication
# ====================  =====================================================================================================
# forward, training     one all-gather of ``2 C + 1`` numbers a rank over the axes that cut the batch (or rows, or columns)
# forward, evaluation   none
# backward, training    one all-reduce of ``2 C`` numbers over the same axes
# running statistics    none where they are sharded as the channels are; else they are gathered (implicit)
# instance norm         forward, training, with running statistics: one all-reduce of ``C`` numbers for each of the two
# ====================  =====================================================================================================
#
# No plan could avoid this communication, so that it does not count as implicit. ``C`` is the number of this rank's channels:
# along an axis that shards channels nothing is exchanged. Gradients of weight and bias are Partial. The means and squared
# deviations of the ranks are merged (Chan et al.), so that no difference of large sums is taken.


_OP = "batch_norm"
_SIGNATURE, _INSTANCE_SIGNATURE = inspect.signature(F.batch_norm), inspect.signature(F.instance_norm)
_RUNNING = ("running_mean", "running_var")


@replaces(F.batch_norm, backward="custom")
def _batch_norm(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``F.batch_norm`` of a DTensor of shape ``(N, C, ...)``."""
    call = _SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    options = call.arguments
    x, mean, var = options["input"], options["running_mean"], options["running_var"]
    training, momentum, eps = options["training"], options["momentum"], options["eps"]
    whole = isinstance(x, DTensor) and all(p.is_replicate() for p in x.placements)
    if not isinstance(x, DTensor) or whole or (mean is None and not training):
        return func(*args, **kwargs)
    num_values = x.numel() // x.shape[1] if x.shape[1] else 0
    if training and num_values <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    layout = _Layout.of(x)
    x = bring_with_gradient(x, layout.input, _OP, "input")
    weight, bias = (
        None if t is None else enter_local(bring_with_gradient(t, layout.channels, _OP, name), layout.channel_grads)
        for t, name in ((options["weight"], "weight"), (options["bias"], "bias"))
    )
    local = enter_local(x)
    with no_torch_function():
        if training:
            statistics = _whole_statistics(local.detach(), layout.group)
            if mean is not None:
                note_writes([mean, var])
                unbiased = statistics.var * (num_values / (num_values - 1))
                layout.update(mean, statistics.mean, momentum, "running_mean", x.shape[1])
                layout.update(var, unbiased, momentum, "running_var", x.shape[1])
        else:
            running = (bring(t, layout.channels, _OP, n) for t, n in ((mean, "running_mean"), (var, "running_var")))
            statistics = _Statistics(*(local_of(t) for t in running))
        result = _Normalize.apply(local, weight, bias, statistics, eps, num_values if training else None, layout.group)
        return leave_local(result, x.device_mesh, layout.input, x.shape, _OP)


@replaces(F.instance_norm)
def _instance_norm(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``F.instance_norm`` of a DTensor. Its running statistics are means over all rows of the batch; PyTorch writes them to
    a copy, which DTensor redistributes, so that they would get lost."""
    call = _INSTANCE_SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    options = call.arguments
    x, running, momentum = options["input"], {name: options[name] for name in _RUNNING}, options["momentum"]
    if not isinstance(x, DTensor) or None in running.values() or not options["use_input_stats"]:
        return func(*args, **kwargs)
    options |= dict.fromkeys(_RUNNING)
    result = func(*call.args, **call.kwargs)
    with no_torch_function(), torch.no_grad():
        var, mean = torch.var_mean(x, _rows(x)[1:])
        for (name, kept), of_rows in zip(running.items(), (mean, var)):
            new: Any = of_rows.mean(0)
            with requested_by(f"instance_norm: {name}"):
                new = new.redistribute(kept.device_mesh, kept.placements)
            kept.mul_(1 - momentum).add_(new.to(kept.dtype), alpha=momentum)
    return result


@dataclass(frozen=True)
class _Statistics:
    """For each of this rank's channels."""

    mean: torch.Tensor
    var: torch.Tensor


@dataclass(frozen=True)
class _Layout:
    """Placements of the operands of a normalization.

    Attributes:
        input: never Partial.
        channels: of tensors with a value for each channel.
        channel_grads: of their gradients: Partial where ranks hold different rows.
        group: the ranks that hold other rows of this rank's channels; None if there are none.
    """

    mesh: DeviceMesh
    input: tuple[Placement, ...]
    channels: tuple[Placement, ...]
    channel_grads: tuple[Placement, ...]
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, x: DTensor) -> _Layout:
        mesh = x.device_mesh
        # Rows may be sharded in any way; channels only as weight and bias can be.
        fits = [p == Shard(1) or shard_dim(p) not in (None, 1) for p in x.placements]
        placed = tuple(p if fit else Replicate() for p, fit in zip(x.placements, fits))
        channels = tuple(Shard(0) if p == Shard(1) else Replicate() for p in placed)
        cuts_rows = [shard_dim(p) not in (None, 1) for p in placed]
        grads = tuple(Partial() if cut else p for cut, p in zip(cuts_rows, channels))
        axes = [axis for axis, cut in enumerate(cuts_rows) if cut and mesh.size(axis) > 1]
        return cls(mesh, placed, channels, grads, axis_group(mesh, axes).group if axes else None)

    def update(self, running: DTensor, value: torch.Tensor, momentum: float, name: str, num_channels: int) -> None:
        """``running = (1 - momentum) * running + momentum * value``, in place."""
        spec = make_spec(self.mesh, self.channels, (num_channels,), (1,), value.dtype)
        new = local_of(bring(make_dtensor(value, spec), running.placements, _OP, name))
        local_of(running).mul_(1 - momentum).add_(new.to(running.dtype), alpha=momentum)


def _rows(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _whole_statistics(local: torch.Tensor, group: dist.ProcessGroup | None) -> _Statistics:
    """Mean and biased variance of each channel over this rank's rows and those of the group."""
    wide = local.float() if local.dtype in (torch.float16, torch.bfloat16) else local
    num_channels, num_values = local.shape[1], math.prod(local.shape[dim] for dim in _rows(local))
    mean = wide.new_zeros(num_channels)
    deviations = wide.new_zeros(num_channels)
    if num_values:
        var, mean = torch.var_mean(wide, _rows(local), correction=0)
        deviations = var * num_values
    if group is None:
        return _Statistics(mean, deviations / num_values)
    own = torch.cat([mean, deviations, mean.new_full((1,), num_values)])
    every = own.new_empty(group.size(), own.numel())
    with requested_by(f"{_OP}: statistics"):
        all_gather_into(every.view(-1), own, group).wait()
    means, squares, counts = every.split([num_channels, num_channels, 1], dim=1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    var = (squares + counts * (means - mean).square()).sum(0) / total
    return _Statistics(mean, var)


class _Normalize(torch.autograd.Function):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` of local tensors.

    ``num_values``: values of a channel on all ranks, if the statistics are those of the input, whose gradient then goes
    through them; None if the statistics are constants.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        statistics: _Statistics,
        eps: float,
        num_values: int | None,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        ctx.num_values, ctx.group, ctx.bias_dtype = num_values, group, None if bias is None else bias.dtype
        inverse = (statistics.var + eps).rsqrt()
        ctx.save_for_backward(x, weight, statistics.mean, inverse)
        if x.numel() == 0:
            return torch.empty_like(x)
        return F.batch_norm(x, statistics.mean, statistics.var, weight, bias, training=False, eps=eps)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        with torch.no_grad():
            found = _Normalize._gradients(ctx, grad, x, weight, mean, inverse)
        once = (
            "batch_norm over a sharded batch has no second derivatives, which create_graph=True requests; normalize "
            "with LayerNorm or GroupNorm, or replicate the batch: write R for the module's <in> in the plan's shard "
            "section"
        )
        return *differentiable_once(found, (grad, x, weight), once), None, None, None, None

    @staticmethod
    def _gradients(
        ctx: Any,
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        mean: torch.Tensor,
        inverse: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        rows, shape = _rows(x), [1, -1, *[1] * (x.ndim - 2)]
        wide = grad.to(mean.dtype)
        centered = x.to(mean.dtype) - mean.view(shape)
        of_bias, of_weight = wide.sum(rows), (wide * centered).sum(rows)
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        of_input = None
        if ctx.needs_input_grad[0]:
            of_input = wide
            if ctx.num_values is not None:
                sums = torch.stack([of_bias, of_weight])
                if ctx.group is not None:
                    with requested_by(f"{_OP}: statistics: gradient"):
                        sums = all_reduce(sums, "sum", ctx.group).wait()
                sums = sums / ctx.num_values
                slope = (sums[1] * inverse.square()).view(shape)
                of_input = wide - sums[0].view(shape) - centered * slope
            of_input = (of_input * scale.view(shape)).to(grad.dtype)
        return (
            of_input,
            (of_weight * inverse).to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None,
            of_bias.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None,
        )
