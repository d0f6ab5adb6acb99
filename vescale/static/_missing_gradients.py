"""Tensors that got no gradient in the recorded step."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import local_of, make_dtensor, spec_of
from vescale.errors import StaticGradientError
from vescale.ops import enter_local

__all__ = ["shown_local", "without_gradient"]


def shown_local(x: DTensor, grad: tuple[Placement, ...] | None, name: str) -> torch.Tensor:
    """The local tensor of a parameter or buffer; ``grad``: placements of its local gradients, None if there are none."""
    if grad is not None:
        return enter_local(x, grad)
    local = local_of(x)
    return without_gradient(local.detach().requires_grad_(), f"the parameter {name}") if x.requires_grad else local


def without_gradient(x: torch.Tensor, what: str) -> torch.Tensor:
    """The same tensor, which needs gradients. One that arrives is an error, because nobody knows what it stands for."""
    found: torch.Tensor = _WithoutGradient.apply(x, what)
    return found


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, what: str) -> torch.Tensor:
        ctx.what = what
        return make_dtensor(local_of(x), spec_of(x), requires_grad=True) if isinstance(x, DTensor) else x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise StaticGradientError(
            f"{ctx.what} of a model in static mode got a gradient, and got none in the step that was recorded; use the same "
            "outputs in the loss of the first step, or parallelize with mode='eager'"
        )
