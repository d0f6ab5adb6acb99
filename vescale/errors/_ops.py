"""Errors of ops on DTensors."""

from __future__ import annotations

from vescale.errors._coded import Coded

__all__ = [
    "IndexBoundsError",
    "LabelError",
    "MixedTensorsError",
    "OpPlacementError",
    "PendingSumWarning",
    "RuleError",
    "UnsupportedOpError",
]


class RuleError(Coded, ValueError, TypeError):
    """A rule that was registered for an op is not one, or returned a decision that does not fit the op."""

    code = "VS1603"


class UnsupportedOpError(Coded, NotImplementedError):
    """An op is not implemented for the placements of its operands: options that need the rows of other ranks, heads cut in
    several runs."""

    code = "VS1606"


class OpPlacementError(Coded, RuntimeError):
    """An op has no meaning on the placements of its operands: a write to a copy, operands on different meshes."""

    code = "VS1604"


class LabelError(Coded, IndexError):
    """Labels of a loss are out of bounds."""

    code = "VS1605"


class MixedTensorsError(Coded, RuntimeError):
    """A plain tensor that requires a gradient meets DTensors outside of a parallelized model, or one of them that requires a
    gradient is written to a plain tensor."""

    code = "VS1607"


class IndexBoundsError(Coded, IndexError):
    """Indices are out of bounds: tokens that an embedding has no row for, positions for ``gather``, classes for
    ``one_hot``."""

    code = "VS1608"


class PendingSumWarning(Coded, UserWarning):
    """`to_local()` of a pending sum (`Partial`) of a parallelized model gave this rank's summand, which is not the value."""

    code = "VS1609"
