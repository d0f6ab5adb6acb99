"""``split``, ``chunk``, ``unbind`` on DTensors whose parts need not all get a gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from vescale.compat import local_of, make_dtensor, make_spec, no_torch_function, spec_of
from vescale.runtime._boundary import reduced

if TYPE_CHECKING:
    from vescale.runtime._runtime import Runtime

__all__ = ["SPLITS", "split"]

SPLITS = tuple(
    function
    for name in ("split", "chunk", "unbind", "tensor_split", "split_with_sizes")
    for function in (getattr(torch, name), getattr(torch.Tensor, name))
) + (torch.Tensor.__iter__,)


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


def split(runtime: Runtime, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """DTensor's own rule; every part then takes part in the backward."""
    iterated = func is torch.Tensor.__iter__
    parts = torch.unbind(args[0]) if iterated else func(*args, **kwargs)
    if parts and all(isinstance(part, DTensor) and part.requires_grad for part in parts):
        with no_torch_function():
            parts = type(parts)(_WholeGradients.apply(*parts))
    return iter(parts) if iterated else parts
