"""Pooling of inputs that PyTorch's rules do not know: to one element, and without a batch dim."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate

from vescale.compat import HAS_SAME_STORAGE, is_tracing, local_of, make_dtensor, make_spec, spec_of
from vescale.errors import OpPlacementError, TransformError
from vescale.ops._conversion import bring
from vescale.ops._registry import OpContext, handles, is_spread, replaces
from vescale.ops._view_copies import remember_copy
from vescale.ops.statistics import mean
from vescale.placements import contiguous_stride

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
