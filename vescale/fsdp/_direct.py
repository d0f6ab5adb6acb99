"""Linear layers that compute their weight's gradient where it is reduced from: no copy at all."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from vescale.compat import note
from vescale.fsdp._bucket import GRADIENT_PLACE, PlaceOfGradient
from vescale.fsdp._group import ParameterGroup

__all__ = ["use_direct_gradients"]


def use_direct_gradients(group: ParameterGroup, enable: bool) -> None:
    """Switch the layers that run ``nn.Linear``'s forward and whose weight is in the group; others are left alone."""
    for parameter in group.parameters:
        for module, name in parameter.slots:
            if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
                continue  # a class that fully_shard has made of Linear does run it
            if name != "weight" or parameter.unsharded_spec is not None:
                continue
            own = module.__dict__.get("forward")
            if enable and own is None:
                note("fsdp._direct:instance", module)
                module.forward = types.MethodType(_forward, module)  # type: ignore[method-assign]
            elif not enable and getattr(own, "__func__", None) is _forward:
                del module.forward


def _forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    weight = self.weight
    place: PlaceOfGradient | None = weight.__dict__.get(GRADIENT_PLACE)
    unreduced = None if place is None else place.unreduced
    if (
        place is None
        or unreduced is None
        or not (torch.is_grad_enabled() and weight.requires_grad)
        or torch.is_autocast_enabled(input.device.type)
    ):
        return nn.functional.linear(input, weight, self.bias)
    return _Linear.apply(input, weight, self.bias, (unreduced, place.index))


class _Linear(torch.autograd.Function):
    """``linear`` whose backward multiplies into the place of the weight's gradient, if that is free."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, place: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.place = place
        return nn.functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        for_input = for_weight = for_bias = None
        if ctx.needs_input_grad[0]:
            for_input = grad @ weight
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[1]:
            unreduced, index = ctx.place
            # With a graph of the backward itself (create_graph) the gradient must be an ordinary, differentiable result.
            out = None if torch.is_grad_enabled() else unreduced.place_for(index, rows.dtype)
            columns = input.reshape(-1, input.shape[-1])
            # Autograd keeps a gradient tensor that nobody else refers to, and adds into copies of others.
            for_weight = torch.mm(rows.t(), columns) if out is None else torch.mm(rows.t(), columns, out=out)
        if ctx.needs_input_grad[2]:
            for_bias = rows.sum(0)
        return for_input, for_weight, for_bias, None
