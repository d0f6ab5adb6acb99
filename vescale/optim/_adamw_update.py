"""AdamW, element by element, for the parameters that are no matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw

__all__ = ["ADAMW_DEFAULTS", "adamw_states", "adamw_update"]

ADAMW_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "capturable": False,
}
"""Options of ``torch.optim.AdamW`` that a group with ``algorithm="adamw"`` takes, and their defaults."""


def adamw_states(tensor: torch.Tensor, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The states of ``torch.optim.AdamW``, placed like the parameter; ``step`` on its device with ``capturable``."""
    zeros = {name: torch.zeros_like(tensor, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.tensor(0.0, device=tensor.device if group["capturable"] else "cpu"), **zeros}


def adamw_update(
    locals_: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    states: Sequence[Mapping[str, torch.Tensor]],
    group: Mapping[str, Any],
) -> None:
    """One step of ``torch.optim.AdamW`` on local tensors, with its bits; with ``capturable`` without a wait of the host."""
    if group["capturable"]:
        for local, gradient, state in zip(locals_, gradients, states):
            _on_the_device(local, gradient, state, group)
        return
    beta1, beta2 = group["betas"]
    adamw(
        list(locals_),
        list(gradients),
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _on_the_device(
    local: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], group: Mapping[str, Any]
) -> None:
    """PyTorch's own form of this takes no tensors on the CPU."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    step, average, square = state["step"].add_(1), state["exp_avg"], state["exp_avg_sq"]
    local.mul_(1 - lr * group["weight_decay"])
    average.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
    local.sub_((average / root * (lr / (1 - beta1**step))).to(local.dtype))
