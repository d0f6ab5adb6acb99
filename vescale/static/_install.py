"""Giving a parallelized model its static mode."""

from __future__ import annotations

from torch import nn

from vescale.compat import native_tape, note, require_native_static
from vescale.errors import NotParallelizedError
from vescale.runtime import Runtime
from vescale.static._forward import StaticForward


class StaticMode:
    """What ``parallelize(mode="static")`` does."""

    def check(self) -> None:
        """Raises StaticHelpersError without the C++ helpers."""
        require_native_static()
        native_tape()

    def install(self, runtime: Runtime, model: nn.Module) -> None:
        runtime.runs_alike = False
        note("static._install:instance", model)
        model.__dict__["forward"] = StaticForward(runtime, model, model.__dict__.get("forward"))


def static_forward(model: nn.Module) -> StaticForward:
    """The static forward of a model. Raises KeyError for others."""
    forward = model.__dict__.get("forward")
    if not isinstance(forward, StaticForward):
        raise NotParallelizedError(
            f"this {type(model).__name__} does not run in static mode; parallelize it with mode='static'"
        )
    return forward
