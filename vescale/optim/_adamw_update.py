"""AdamW, element by element, for the parameters that are no matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw

__all__ = ["ADAMW_DEFAULTS", "adamw_states", "adamw_update"]

ADAMW_DEFAULTS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
"""Options of ``torch.optim.AdamW`` that a group with ``algorithm="adamw"`` takes, and their defaults."""


def adamw_states(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The states of ``torch.optim.AdamW``, placed like the parameter."""
    zeros = {name: torch.zeros_like(tensor, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.tensor(0.0), **zeros}


def adamw_update(
    locals_: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    states: Sequence[Mapping[str, torch.Tensor]],
    group: Mapping[str, Any],
) -> None:
    """One step of ``torch.optim.AdamW`` on local tensors, with its bits."""
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
