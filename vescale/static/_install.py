"""Giving a parallelized model its static mode."""

from __future__ import annotations

from torch import nn

from vescale.errors import NotParallelizedError
from vescale.runtime import Runtime
from vescale.static._forward import StaticForward

__all__ = ["install", "static_forward"]


def install(runtime: Runtime, model: nn.Module) -> None:
    model.__dict__["forward"] = StaticForward(runtime, model, model.__dict__.get("forward"))


def static_forward(model: nn.Module) -> StaticForward:
    """The static forward of a model. Raises KeyError for others."""
    forward = model.__dict__.get("forward")
    if not isinstance(forward, StaticForward):
        raise NotParallelizedError(
            f"this {type(model).__name__} does not run in static mode; parallelize it with mode='static'"
        )
    return forward
