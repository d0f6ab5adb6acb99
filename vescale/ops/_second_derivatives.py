"""Gradients without derivatives: differentiating them raises, instead of leaving out a part.

``torch.autograd.function.once_differentiable`` raises neither where the incoming gradient is constant (that of ``x.sum()``),
nor where derivatives are computed for some tensors only (``torch.autograd.grad(y, inputs)``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vescale.errors import OpPlacementError


def differentiable_once(
    gradients: Sequence[torch.Tensor | None], sources: Sequence[torch.Tensor | None], message: str
) -> tuple[torch.Tensor | None, ...]:
    """The value for a ``backward`` to return: ``gradients``, which were computed without autograd from ``sources`` (the
    incoming gradient and the inputs). Under ``create_graph``, differentiating them raises RuntimeError(message)."""
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
        raise OpPlacementError(ctx.message)
