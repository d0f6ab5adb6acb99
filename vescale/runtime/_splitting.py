"""``split``, ``chunk``, ``unbind`` on DTensors whose parts need not all get a gradient.

Along a dim that is sharded as a whole, parts lie on few ranks each. Equal parts are spread over all of them by one
all-to-all (to :class:`InterleavedShard`, which a plan can name for the weight that makes the tensor), where DTensor gathers
everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Shard

from vescale.compat import local_of, make_dtensor, make_spec, no_torch_function, spec_of
from vescale.ops import bring, bring_with_gradient, contiguous_stride, reduced
from vescale.placements import InterleavedShard
from vescale.runtime._views import remember_copy

if TYPE_CHECKING:
    from vescale.runtime._runtime import Runtime

__all__ = ["SPLITS", "split"]

SPLITS = tuple(
    function
    for name in ("split", "chunk", "unbind", "tensor_split", "split_with_sizes")
    for function in (getattr(torch, name), getattr(torch.Tensor, name))
) + (torch.Tensor.__iter__,)
_ONE_BY_ONE = (torch.unbind, torch.Tensor.unbind, torch.Tensor.__iter__)


class _WholeGradients(torch.autograd.Function):
    """Identity; parts without a gradient get zeros placed as they are. PyTorch would make plain tensors of them, and
    DTensor cannot put those together with the others."""

    @staticmethod
    def forward(ctx: Any, *parts: DTensor) -> tuple[DTensor, ...]:
        ctx.specs = [spec_of(part) for part in parts]
        ctx.locals = [local_of(part).new_empty(0) for part in parts]
        ctx.shapes = [local_of(part).shape for part in parts]
        ctx.set_materialize_grads(False)
        return tuple(make_dtensor(local_of(part), spec_of(part), requires_grad=True) for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: DTensor | None) -> tuple[DTensor, ...]:
        with no_torch_function():
            return tuple(
                make_dtensor(like.new_zeros(shape), _whole(spec)) if grad is None else grad
                for grad, spec, like, shape in zip(grads, ctx.specs, ctx.locals, ctx.shapes)
            )


def _whole(spec: Any) -> Any:
    """The part's spec without Partial: zeros are their own reduction."""
    return make_spec(spec.mesh, reduced(spec.placements), spec.shape, spec.stride, spec.tensor_meta.dtype)


class _Chunks(torch.autograd.Function):
    """The parts of an interleaved dim, each of which every rank has a part of. Their gradients are put together on each
    rank; PyTorch would concatenate the global tensors, for which DTensor gathers them."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, dim: int, *parts: DTensor) -> tuple[DTensor, ...]:
        ctx.spec, ctx.dim, ctx.specs = spec_of(x), dim, [spec_of(part) for part in parts]
        ctx.shapes = [local_of(part).shape for part in parts]
        ctx.set_materialize_grads(False)
        return tuple(make_dtensor(local_of(part).detach(), spec_of(part), requires_grad=True) for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: DTensor | None) -> tuple[Any, ...]:
        like = next(local_of(grad) for grad in grads if grad is not None)
        with no_torch_function():
            found = [
                like.new_zeros(shape)
                if grad is None
                else local_of(bring(grad, reduced(spec.placements), "split", "gradient"))
                for grad, spec, shape in zip(grads, ctx.specs, ctx.shapes)
            ]
            shape, placements = ctx.spec.shape, reduced(ctx.spec.placements)
            spec = make_spec(ctx.spec.mesh, placements, shape, contiguous_stride(shape), like.dtype)
            return make_dtensor(torch.cat(found, ctx.dim), spec), None, *(None for _ in grads)


def _interleaved_dim(x: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The dim that is split, when its pieces are each sharded."""
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    dim = dim % x.ndim if isinstance(dim, int) and x.ndim else -1
    return dim if any(isinstance(p, InterleavedShard) and p.dim == dim for p in x.placements) else None


def _spread(runtime: Runtime, x: DTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """``x`` with each of the equal parts that it is split into sharded, if the dim is sharded as a whole, over one axis."""
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    dim = dim % x.ndim if isinstance(dim, int) and x.ndim else -1
    axes = [axis for axis, p in enumerate(x.placements) if type(p) is Shard and p.dim == dim]
    if len(axes) != 1 or runtime.mesh.size(axes[0]) == 1:
        return x
    with torch.no_grad():
        looks = func(torch.empty(x.shape, device="meta"), *args[1:], **kwargs)
    if len(looks) < 2 or len({part.shape[dim] for part in looks}) > 1:
        return x
    target = list(x.placements)
    target[axes[0]] = InterleavedShard(dim, len(looks))
    spread = bring_with_gradient(x, target, func.__name__, "self")
    # The parts are views: they can be written to.
    remember_copy(local_of(x), spec_of(x), local_of(spread), spec_of(spread))
    return spread


def _are_local(x: DTensor, dim: int, parts: tuple[Any, ...]) -> bool:
    """Whether what each rank has of the parts is what it has of the whole."""
    held = sum(local_of(part).shape[dim] for part in parts)
    return all(len(part.placements) == len(x.placements) for part in parts) and held == local_of(x).shape[dim]


def split(runtime: Runtime, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """DTensor's own rule; every part then takes part in the backward."""
    iterated = func is torch.Tensor.__iter__
    x = args[0] if args else None
    if isinstance(x, DTensor) and func not in _ONE_BY_ONE:
        x = _spread(runtime, x, func, args, kwargs)
        args = (x, *args[1:])
    if isinstance(x, DTensor) and x.requires_grad and torch.is_grad_enabled() and func not in _ONE_BY_ONE:
        dim = _interleaved_dim(x, args, kwargs)
        if dim is not None:
            with torch.no_grad():
                parts = tuple(func(*args, **kwargs))
            if _are_local(x, dim, parts):
                with no_torch_function():
                    return _Chunks.apply(x, dim, *parts)
    parts = torch.unbind(args[0]) if iterated else func(*args, **kwargs)
    if parts and all(isinstance(part, DTensor) and part.requires_grad for part in parts):
        with no_torch_function():
            parts = type(parts)(_WholeGradients.apply(*parts))
    return iter(parts) if iterated else parts
