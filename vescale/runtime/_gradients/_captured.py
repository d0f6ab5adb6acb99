"""Gradients that ``torch.autograd.grad`` returns instead of accumulating."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.compat import is_captured, local_of, make_dtensor, make_spec, no_torch_function
from vescale.ops import convert, reduced, wrap_global
from vescale.placements import contiguous_stride
from vescale.runtime._gradients._entry import GradientRule

__all__ = ["complete_captured"]


def complete_captured(parameter: nn.Parameter, name: str, rule: GradientRule) -> None:
    """Let ``torch.autograd.grad`` return complete gradients of a parameter, differentiable; each reduced by itself."""
    assert isinstance(parameter, DTensor)
    own = reduced(parameter.placements)
    mesh = parameter.device_mesh
    target = tuple(o if p is None else p for o, p in zip(own, rule.target or own))

    def complete(grad: torch.Tensor) -> torch.Tensor | None:
        if not is_captured(parameter):
            return None
        if not isinstance(grad, DTensor):
            return wrap_global(grad, mesh, target, name)
        if rule.source is not None:
            placements = tuple(f if s is None else s for f, s in zip(grad.placements, rule.source))
            with no_torch_function():
                spec = make_spec(mesh, placements, grad.shape, contiguous_stride(grad.shape), grad.dtype)
                grad = make_dtensor(local_of(grad), spec)
        return grad if tuple(grad.placements) == target else convert(grad, target, requester=f"{name}.grad")

    parameter.register_hook(complete)
