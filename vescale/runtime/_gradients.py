"""Gradients of parameters: complete, and placed as the plan says, before anything else sees them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import local_of, make_dtensor, make_spec, no_torch_function
from vescale.runtime._boundary import contiguous_stride, convert, reduced, wrap_global

__all__ = ["label_gradient", "reduce_gradient"]


def reduce_gradient(parameter: DTensor, name: str, placements: Sequence[Placement | None] | None = None) -> None:
    """Reduce each gradient of a parameter the moment it is whole on this rank.

    ========================  ======================================================================================
    moment                    the gradient
    ========================  ======================================================================================
    leaves the last op        one contribution a rank: Partial on the axes that shard the batch (and, for a replicated
                              parameter, on those that shard what it meets)
    enters accumulation       as ``placements``, by default the parameter's; one reduction an axis
    ``backward()`` returned   ``parameter.grad`` is complete; further backwards add complete gradients
    ========================  ======================================================================================

    The hook gets the sum of all that one backward contributes, also when the parameter is used several times. This is
    the one place where parameters' gradients are reduced: the seam for fused buckets.
    """
    own = reduced(parameter.placements)
    target = tuple(o if p is None else p for o, p in zip(own, placements)) if placements is not None else own
    mesh = parameter.device_mesh

    def reduce(grad: torch.Tensor) -> torch.Tensor:
        if not isinstance(grad, DTensor):
            return wrap_global(grad, mesh, target, name)
        return grad if tuple(grad.placements) == target else convert(grad, target, who=f"{name}.grad")

    parameter.register_hook(reduce)


def label_gradient(parameter: DTensor, placements: Sequence[Placement | None]) -> None:
    """Take each rank's gradient for what the plan says it is; nothing moves."""

    def label(grad: torch.Tensor) -> torch.Tensor:
        with no_torch_function():
            local = local_of(grad) if isinstance(grad, DTensor) else grad
            target = tuple(o if p is None else p for o, p in zip(parameter.placements, placements))
            spec = make_spec(
                parameter.device_mesh, target, parameter.shape, contiguous_stride(parameter.shape), local.dtype
            )
            return make_dtensor(local, spec)

    parameter.register_hook(label)
