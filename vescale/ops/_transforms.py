"""Transforms of ``torch.func`` and forward-mode differentiation, for which changes of placements have no rules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from vescale.compat import has_tangent, in_dual_level, in_transform, without_transforms
from vescale.errors import TransformError

__all__ = ["apply_outside", "is_differentiated", "refuse_transforms"]


def refuse_transforms(tensors: Iterable[torch.Tensor], where: str) -> None:
    """``where``: what they enter. Raises TransformError where a running transform has wrapped one, or one has a tangent."""
    is_transformed = in_transform()
    for x in tensors if is_transformed or in_dual_level() else ():
        if (is_transformed and without_transforms(x) is not x) or has_tangent(x):
            raise _error(where)


def is_differentiated(x: torch.Tensor) -> bool:
    """Whether what is made of ``x`` is linked to it: by a gradient, or a tangent."""
    return (x.requires_grad and torch.is_grad_enabled()) or has_tangent(x)


def apply_outside(function: type[torch.autograd.Function], *args: Any, where: str = "") -> Any:
    """``function.apply``, which has a rule for gradients only. Raises TransformError inside of a transform."""
    if in_transform() or any(isinstance(x, torch.Tensor) and has_tangent(x) for x in args):
        raise _error(where or "a DTensor")
    return function.apply(*args)


def _error(where: str) -> TransformError:
    kind = "a transform of torch.func (grad, vjp, vmap, ...)" if in_transform() else "forward-mode differentiation"
    return TransformError(
        f"{kind} of {where}: placements change here, and only gradients have a rule for that. Expected reverse mode: "
        "torch.autograd.grad(..., create_graph=True), and jacobian, jvp, vjp and hvp of torch.autograd.functional; or "
        "functions of tensors, and modules without entries, inside of the model"
    )
