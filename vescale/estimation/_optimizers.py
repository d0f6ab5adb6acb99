"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from vescale.errors import ArgumentError, ArgumentTypeError, kind_of
from vescale.plans import did_you_mean


def _adamw8bit(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    from vescale.optim import AdamW8bit

    return AdamW8bit(parameters)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "adamw-for-loop": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters),
    "adamw8bit": _adamw8bit,
}


def make_optimizer(optimizer: Any) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None:
    """Raises ValueError for an unknown name, TypeError for what cannot be called."""
    if optimizer is None or optimizer == "none":
        return None
    if isinstance(optimizer, str):
        if optimizer.lower() not in OPTIMIZERS:
            raise ArgumentError(
                f"optimizer {optimizer!r} is not one of "
                f"{', '.join(OPTIMIZERS)}{did_you_mean(optimizer, tuple(OPTIMIZERS))}"
            )
        return OPTIMIZERS[optimizer.lower()]
    if not callable(optimizer):
        raise ArgumentTypeError(f"optimizer is {kind_of(optimizer)}; pass a name, or a function of the parameters")
    return optimizer
