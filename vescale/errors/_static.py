"""Errors of static mode."""

from __future__ import annotations

from vescale.errors._coded import Coded

__all__ = [
    "StaticGradientError",
]


class StaticGradientError(Coded, RuntimeError):
    """An output of a model in static mode got a gradient, and got none in the step that was recorded."""

    code = "VS1101"
