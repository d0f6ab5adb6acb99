"""Errors of static mode."""

from __future__ import annotations

from vescale.errors._coded import Coded
from vescale.errors._plan_error import PlanError

__all__ = [
    "StaticGradientError",
    "StaticHelpersError",
    "StaticRecordError",
    "StaticStepError",
]


class StaticGradientError(Coded, RuntimeError):
    """An output of a model in static mode got a gradient, and got none in the step that was recorded."""

    code = "VS1101"


class StaticRecordError(PlanError):
    """A record of static mode cannot be written or read, or does not fit the model, the plan, the mesh or PyTorch."""

    code = "VS1102"


class StaticStepError(Coded, RuntimeError):
    """A step in static mode met what was not recorded after it had written to a large tensor, or to a parameter."""

    code = "VS1103"


class StaticHelpersError(PlanError):
    """Static mode was asked for where its C++ helpers are missing or switched off."""

    code = "VS1104"
