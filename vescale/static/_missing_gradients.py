"""Local tensors of parameters and buffers, also of those that got no gradient in the recorded step."""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import local_of, make_dtensor, spec_of
from vescale.errors import StaticStepError
from vescale.ops import enter_local

# By the parameter and its ``grad``, as long as somebody shows them.
_SHOWN: weakref.WeakValueDictionary[Any, torch.Tensor] = weakref.WeakValueDictionary()


def shown_local(x: DTensor, grad: tuple[Placement, ...] | None, name: str) -> torch.Tensor:
    """The local tensor of a parameter or buffer; ``grad``: placements of its local gradients, None if there are none.

    All forwards show the same one, so that gradients of several forwards are added in the order of eager mode.
    """
    local = local_of(x)
    if not x.requires_grad:
        return local
    known: Any = _SHOWN.get((id(x), grad))
    if known is not None and known.data_ptr() == local.data_ptr():
        of, of_local = known._vescale_source
        if of is x and of_local is local:
            return cast(torch.Tensor, known)
    made: Any = (
        without_gradient(local.detach().requires_grad_(), f"the parameter {name}")
        if grad is None
        else enter_local(x, grad)
    )
    made._vescale_source = x, local
    _SHOWN[id(x), grad] = made
    return cast(torch.Tensor, made)


def without_gradient(x: torch.Tensor, what: str) -> torch.Tensor:
    """The same tensor, which needs gradients. One that arrives is an error, because nobody knows what it stands for."""
    found: torch.Tensor = _WithoutGradient.apply(x, what)
    return found


def refuse_second_derivatives(_: Any) -> None:
    """Before the backward of a static forward begins: the placements of gradients of gradients are not known."""
    if torch.is_grad_enabled():
        raise StaticStepError(
            "backward(create_graph=True) was called on a model in static mode, whose step was recorded without it: "
            "second derivatives (gradient penalties, Hessian-vector products) need DTensors. Compute them in the "
            "first step already, so that the model runs in eager mode, or parallelize with mode='eager'"
        )


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, what: str) -> torch.Tensor:
        ctx.what = what
        return make_dtensor(local_of(x), spec_of(x), requires_grad=True) if isinstance(x, DTensor) else x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise StaticStepError(
            f"{ctx.what} of a model in static mode got a gradient, but got none in the recorded step; use the same "
            "outputs in the loss of the first step, or parallelize with mode='eager'"
        )
