"""Arithmetic on statistics: numbers that are sums over sharded dims, such as the means of a load-balancing loss.

A statistic is a number or a vector that each rank has summed over its tokens, and that is Partial. Linear functions keep it
Partial; a function that is not linear in it first reduces it, by an all-reduce of one number an element. Stock DTensor would
keep one of two factors Partial, and with it all gradients behind the product, which would be reduced at full size.

No plan could place these sums, which are computed and used inside of one forward. Their reduction is not implicit; the
ledger's requester is ``statistic``. A Partial tensor with more than one dim larger than 1 is an activation, which an
``<out>`` entry should place, and is left alone.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import requested_by
from vescale.compat import HAS_SAME_STORAGE, DTensorSpec, is_tracing, local_of, make_dtensor, make_spec, spec_of
from vescale.errors import OpPlacementError, TransformError
from vescale.ops._conversion import bring, convert
from vescale.ops._registry import OpContext, When, handles, is_spread, replaces
from vescale.ops._view_copies import remember_copy
from vescale.placements import contiguous_stride, is_pending, move_local, shard_dim, without_partials


def _overloads(names: str) -> list[Any]:
    """The functions and methods of tensors with these names."""
    return [getattr(owner, name) for name in names.split() for owner in (torch, torch.Tensor) if hasattr(owner, name)]


# Linear in no operand; linear in each, but not in two at once; linear in the dividend alone; linear up to a constant.
_NONLINEAR = _overloads(
    """
    abs exp log log1p pow rsqrt sqrt square sigmoid softmax log_softmax std tanh var norm max min clamp relu
    __pow__ __rpow__ __rdiv__
    """
)
_PRODUCTS = _overloads("mul multiply dot mul_ __mul__ __rmul__ __imul__")
_PRODUCTS_IN_PLACE = (torch.Tensor.mul_, torch.Tensor.__imul__)
_QUOTIENTS = _overloads("div divide true_divide div_ __truediv__ __div__ __itruediv__")
_OFFSETS = _overloads("add sub __add__ __radd__ __sub__ __rsub__") + [torch.subtract, torch.rsub]
# In place: the left operand keeps its placement.
_ADDITIONS = [getattr(torch.Tensor, name) for name in ("add_", "sub_", "__iadd__", "__isub__")]


@replaces(*_ADDITIONS, when=When.PARTIAL)
def _addition(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    whole = isinstance(args[0], DTensor) and all(placement.is_replicate() for placement in args[0].placements)
    return func(args[0], *(_reduced(x, func) if whole else x for x in args[1:]), **kwargs)


@replaces(*_NONLINEAR, when=When.PARTIAL)
def _nonlinear(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*(_reduced(x, func) for x in args), **kwargs)


@replaces(*_PRODUCTS, when=When.PARTIAL)
def _product(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if sum(_is_pending(x) for x in args) > 1:
        # What is written to stays what it is: a product is linear in the one factor that is left.
        kept = 1 if func in _PRODUCTS_IN_PLACE else 0
        args = (*args[:kept], *(_reduced(x, func) for x in args[kept:]))
    return func(*args, **kwargs)


@replaces(*_OFFSETS, when=When.PARTIAL)
def _offset(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A number is added once, not by every rank. Zero, which Python's ``sum()`` begins with, keeps a statistic Partial."""
    if len(args) == 2 and not kwargs:
        for number, x in (args, args[::-1]):
            if isinstance(number, int | float) and _is_pending(x):
                if number == 0 and func in (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__):
                    return x * 1
                return func(*(_reduced(operand, func) for operand in args))
    return func(*args, **kwargs)


@replaces(torch.mean, torch.Tensor.mean, when=When.NOT_REPLICATE)
def mean(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The mean of a Partial tensor, or over sharded dims, as a Partial sum divided by the global count.

    Stock DTensor reduces the former, gathers the latter if shards are uneven, and its Partial averages cannot be added to
    Partial sums.
    """
    over = _reduced_dims(args, kwargs)
    x = args[0]
    if over is None:
        return func(*args, **kwargs)
    if x.dtype not in (torch.float32, torch.float64):
        return func(_before_reduction(x, over, func), *args[1:], **kwargs)
    if not any(is_pending(p, "sum") or shard_dim(p) in over for p in x.placements):
        return func(*args, **kwargs)
    keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    return _sum(context, torch.sum, (x, over, keepdim), {}) / math.prod(x.shape[dim] for dim in over)


@replaces(torch.sum, torch.Tensor.sum, when=When.NOT_REPLICATE)
def _sum(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sum. If sharded dims are reduced, the gradient of ``x`` is sharded like ``x``. DTensor returns a Replicate gradient
    there: every rank then runs the backward on the global shape, and gathers unevenly sharded operands."""
    over = _reduced_dims(args, kwargs)
    return func(*args, **kwargs) if over is None else func(_before_reduction(args[0], over, func), *args[1:], **kwargs)


def _before_reduction(x: DTensor, over: tuple[int, ...], func: Any) -> DTensor:
    """``x``, converted so that the backward shards its gradient if a reduced dim is sharded."""
    if not x.requires_grad or not any(shard_dim(p) in over for p in x.placements):
        return x
    return convert(x, [None if p.is_partial() else p for p in x.placements], requester=func.__name__)


def _reduced_dims(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """The dims of a call ``reduction(x, dim, keepdim)``; None for other calls."""
    x, *given = args
    if not isinstance(x, DTensor) or not x.ndim or len(given) > 2 or kwargs.keys() - {"dim", "keepdim"}:
        return None
    dims = given[0] if given else kwargs.get("dim")
    dims = range(x.ndim) if dims is None else (dims,) if isinstance(dims, int) else dims or range(x.ndim)
    return tuple(sorted({dim % x.ndim for dim in dims}))


@replaces(*_QUOTIENTS, when=When.PARTIAL)
def _quotient(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args[:1], *(_reduced(x, func) for x in args[1:]), **kwargs)


def _is_pending(x: Any) -> bool:
    """Whether ``x`` is a statistic that is Partial."""
    return (
        isinstance(x, DTensor)
        and any(placement.is_partial() for placement in x.placements)
        and sum(size > 1 for size in x.shape) <= 1
    )


def _reduced(x: Any, func: Any) -> Any:
    if not _is_pending(x):
        return x
    target: list[Placement] = list(without_partials(x.placements))
    return convert(x, target, requester=f"statistic: {func.__name__}")


def _adds_up_shards(op: Any, schema: Any) -> bool:
    """Whether ``scatter_add(x, dim, index, source)`` adds to a vector that is Replicate, at sharded indices."""
    specs = [schema.args_schema[position] for position in (0, 2, 3)]
    if not all(isinstance(spec, DTensorSpec) and len(spec.shape) == 1 for spec in specs):
        return False
    x, index, _ = (spec.placements for spec in specs)
    if any(shard_dim(p) is None and not p.is_replicate() for p in index):
        return False
    return all(p.is_replicate() for p in x) and not all(p.is_replicate() for p in index)


def _has_larger_source(schema: Any) -> bool:
    """Whether the source of ``scatter_add(x, dim, index, source)`` has elements that no index takes."""
    index, source = schema.args_schema[2:4]
    return isinstance(index, DTensorSpec) and isinstance(source, DTensorSpec) and index.shape != source.shape


@handles(
    torch.ops.aten.scatter_add.default,
    torch.ops.aten.scatter_add_.default,
    applies=lambda op, schema: _adds_up_shards(op, schema) or _has_larger_source(schema),
)
def _scatter_add(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Counts of sharded tokens, ``counts.scatter_add(0, expert of each token, number)``: each rank adds up its tokens."""
    x, dim, index, source = args
    if source.shape != index.shape:  # which PyTorch's rule would shard as if they were
        return op(x, dim, index, source[tuple(map(slice, index.shape))])
    own = local_of(bring(source, index.placements, str(op), "src"))
    partial = [Replicate() if p.is_replicate() else Partial() for p in index.placements]
    added = torch.zeros_like(local_of(x)).scatter_add(0, local_of(index), own)
    with requested_by("statistic: scatter_add"):
        added = move_local(added, x.device_mesh, x.shape, partial, x.placements).wait()
    if op is torch.ops.aten.scatter_add_.default:
        local_of(x).add_(added)
        return x
    return make_dtensor(local_of(x) + added, spec_of(x))


# Pooling of inputs that PyTorch's rules do not know: to one element, and without a batch dim.


_aten = torch.ops.aten

# function -> number of trailing dims that it averages
_NUM_DIMS: dict[Any, int] = {F.adaptive_avg_pool1d: 1, F.adaptive_avg_pool2d: 2, F.adaptive_avg_pool3d: 3}


@replaces(*_NUM_DIMS)
def _adaptive_average(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func(input, output_size)``; to one element as a mean. Torch itself decomposes that, changes strides in place and,
    in backward, copies to a tensor with the strides of the base: DTensor has no rules for these."""
    call = _SIGNATURE.bind(*args, **kwargs).arguments
    x, size, num_dims = call["input"], call["output_size"], _NUM_DIMS[func]
    size = [size] * num_dims if isinstance(size, int) else list(size)
    if size != [1] * num_dims or x.ndim not in (num_dims + 1, num_dims + 2):
        return func(*args, **kwargs)
    return mean(context, torch.mean, (x, list(range(-num_dims, 0)), True), {})


def _has_no_batch(op: Any, schema: Any) -> bool:
    return schema.args_schema[0].ndim == _NUM_SPATIAL[op] + 1 and is_spread(op, schema)


_NUM_SPATIAL = {
    _aten._adaptive_avg_pool2d_backward.default: 2,
    _aten.max_unpool2d.default: 2,
    _aten.max_unpool3d.default: 3,
}


@handles(*_NUM_SPATIAL, applies=_has_no_batch)
def _with_batch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same with a batch of one. PyTorch's rule runs each rank on its part of dim 1, which without a batch is not the
    channels but a dim that is pooled."""
    args = tuple(x.unsqueeze(0) if isinstance(x, torch.Tensor) else x for x in args)
    return op(*args, **kwargs).squeeze(0)


_SIGNATURE = inspect.Signature(
    [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("input", "output_size")]
)


# Ops that give a tensor another shape or other memory: ``resize_``, ``set_``, ``as_strided_``. The whole tensor's order
# of elements in memory is no rank's, so that only what does not depend on it runs.


@handles(_aten.resize_.default, _aten.resize_as_.default)
def _resize(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a tensor without elements, or to its own shape. Communication: none."""
    x: Any = args[0]
    shape = tuple(args[1].shape) if op is _aten.resize_as_.default else tuple(args[1])
    if not isinstance(x, DTensor):
        return op(x, torch.empty(shape, device="meta") if op is _aten.resize_as_.default else shape)
    if shape == tuple(x.shape):
        return x
    if x.numel():
        raise _error(op, x, f"shape {shape}", f"x = x.flatten()[:{torch.Size(shape).numel()}].view({shape})")
    local = torch.empty(shape, dtype=x.dtype, device=x.device)
    whole = (Replicate(),) * x.device_mesh.ndim
    x.data = make_dtensor(local, make_spec(x.device_mesh, whole, shape, contiguous_stride(shape), x.dtype))
    return x


@handles(_aten.set_.source_Tensor)
def _set(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The memory of another DTensor that is placed alike. Communication: none."""
    x, source = args
    fits = isinstance(x, DTensor) and isinstance(source, DTensor) and x.device_mesh == source.device_mesh
    if not fits or (x.shape == source.shape and x.placements != source.placements):
        given = f"{tuple(source.placements)}" if isinstance(source, DTensor) else "a plain tensor"
        raise _error(op, x, f"the memory of {given}", "x = source")
    x.data = source
    return x


@handles(_aten.as_strided.default)
def _as_strided(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Strides count in the global tensor: a view of all of it (``fill_diagonal_``), which stock DTensor refuses."""
    x, size, stride = args[:3]
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    if tuple(size) == tuple(x.shape) and tuple(stride) == x.stride() and not offset:
        return _aten.alias.default(x)
    whole = make_spec(x.device_mesh, (Replicate(),) * x.device_mesh.ndim, x.shape, x.stride(), x.dtype)
    local = local_of(bring(x, whole.placements, str(op), "self"))
    if local.stride() != x.stride():
        local = local.new_empty_strided(x.shape, x.stride()).copy_(local)
    remember_copy(local_of(x), spec_of(x), local, whole)
    viewed = local.as_strided(size, stride, local.storage_offset() + (offset or 0))
    return make_dtensor(viewed, make_spec(whole.mesh, whole.placements, viewed.shape, viewed.stride(), x.dtype))


@handles(_aten.as_strided_.default)
def _as_strided_(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Other strides of dims of size 1, as the mean over pixels in channels_last has. Communication: none."""
    x, size, stride, *offset = args
    is_same = isinstance(x, DTensor) and tuple(size) == tuple(x.shape) and not any(offset) and not kwargs
    if is_same and all(a == b for a, b, length in zip(stride, x.stride(), size, strict=True) if length > 1):
        return x
    return _refuse(op, args, kwargs)


@handles(_aten.set_.default, _aten.set_.source_Storage, _aten.set_.source_Storage_storage_offset)
def _refuse(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise _error(op, args[0], "other memory", "a new tensor: x = x.as_strided(...), x = torch.empty_like(x)")


@handles(_aten.is_set_to.default)
def _is_set_to(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    x, other = args
    if not isinstance(x, DTensor) or not isinstance(other, DTensor):
        return False
    return spec_of(x) == spec_of(other) and bool(op(local_of(x), local_of(other)))


def _error(op: Any, x: Any, what: str, edit: str) -> OpPlacementError:
    name = str(op).removeprefix("aten.").partition(".")[0]
    placed = tuple(x.placements) if isinstance(x, DTensor) else "a plain tensor"
    return OpPlacementError(
        f"{name} gives a tensor of shape {tuple(x.shape)} placed as {placed} {what}: ranks hold parts of it, whose "
        f"memory order differs from that of the whole tensor. Expected {edit}"
    )


@handles(HAS_SAME_STORAGE)
def _has_same_storage_numel(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Asked of every tensor that gets a tangent, by ``make_dual`` and so by ``torch.func.jvp``; strides are compared
    separately. The answer is the same on every rank. Communication: none.

    Raises TransformError while ``torch.fx`` traces, as ``torch.func.linearize`` does: a trace records the ops on local
    tensors without the DTensors that they belong to, and takes these tensors for constants.
    """
    primal, tangent = args
    if is_tracing():
        raise TransformError(
            f"torch.func.linearize of a function of DTensors (here of shape {tuple(primal.shape)}): its trace treats "
            "their local tensors as constants, so that the function that it returns would not depend on the tangent. "
            "Expected torch.func.jvp(function, primals, tangents), which computes the same for one tangent"
        )
    return bool(primal.numel() == tangent.numel())
