"""Where a module, and a group of parameters, is in an iteration."""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["Phase"]


class Phase(Enum):
    """``IDLE`` -> ``FORWARD`` -> ``IDLE`` -> ``BACKWARD`` -> ``REDUCED`` -> ``IDLE``."""

    IDLE = auto()
    FORWARD = auto()
    """From before forward until after it."""
    BACKWARD = auto()
    """From the first gradient of an output until those of the inputs are there."""
    REDUCED = auto()
    """Gradients have been handed to the reduction; until the end of backward."""
