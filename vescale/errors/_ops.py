"""Errors of ops on DTensors."""

from __future__ import annotations

from vescale.errors._coded import Coded

__all__ = [
    "LabelError",
    "OpPlacementError",
    "RuleError",
]


class RuleError(Coded, ValueError, TypeError):
    """A rule that was registered for an op is not one, or returned a decision that does not fit the op."""

    code = "VS1603"


class OpPlacementError(Coded, NotImplementedError):
    """An op has no meaning on the placements of its operands: a write to a copy, operands on different meshes, options
    that need the rows of other ranks."""

    code = "VS1604"


class LabelError(Coded, IndexError):
    """Labels of a loss are out of bounds."""

    code = "VS1605"
