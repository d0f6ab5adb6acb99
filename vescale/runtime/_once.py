"""Gradients that have no derivatives: to ask for these is an error, never a part of them.

``torch.autograd.function.once_differentiable`` is silent where the gradient that arrives is constant (that of ``x.sum()``),
and where derivatives are asked for some tensors only (``torch.autograd.grad(y, inputs)``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["differentiable_once"]


def differentiable_once(
    gradients: Sequence[torch.Tensor | None], sources: Sequence[torch.Tensor | None], message: str
) -> tuple[torch.Tensor | None, ...]:
    """What a ``backward`` returns: ``gradients``, computed without autograd from ``sources`` (the gradient that arrived, and
    inputs). In a backward with ``create_graph``, RuntimeError with ``message`` when somebody differentiates them further."""
    parts = [x for x in sources if x is not None and x.requires_grad]
    if not torch.is_grad_enabled() or not parts:
        return tuple(gradients)
    given = [x for x in gradients if x is not None]
    marked = iter(_Once.apply(message, len(given), *given, *parts))
    return tuple(None if x is None else next(marked) for x in gradients)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, message: str, num: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.message = message
        return tuple(x.detach() for x in tensors[:num])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(ctx.message)
