"""Errors of static mode."""

from __future__ import annotations

from vescale.errors._coded import Coded
from vescale.errors._plan_error import PlanError

__all__ = [
    "StaticGradientError",
    "StaticRecordError",
]


class StaticGradientError(Coded, RuntimeError):
    """An output of a model in static mode got a gradient, and got none in the step that was recorded."""

    code = "VS1101"


class StaticRecordError(PlanError):
    """A record of static mode cannot be written or read, or does not fit the model, the plan, the mesh or PyTorch."""

    code = "VS1102"
