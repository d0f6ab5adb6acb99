"""Errors of scripts around a model."""

from __future__ import annotations

from vescale.errors._coded import Coded

__all__ = [
    "AdoptionError",
    "ParameterHookError",
]


class AdoptionError(Coded, ValueError):
    """`parallelize(..., optimizer=)` was given an optimizer that cannot be adopted."""

    code = "VS0304"


class ParameterHookError(Coded, ValueError):
    """A parameter that is going to be replaced has gradient hooks, which would never run."""

    code = "VS0306"
