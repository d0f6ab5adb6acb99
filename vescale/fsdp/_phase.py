"""Where a module, and a group of parameters, is in an iteration, and where gradients are meanwhile."""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["GradientPlace", "Phase"]


class Phase(Enum):
    """``IDLE`` -> ``FORWARD`` -> ``IDLE`` -> ``BACKWARD`` -> ``REDUCED`` -> ``IDLE``."""

    IDLE = auto()
    FORWARD = auto()
    """From before forward until after it."""
    BACKWARD = auto()
    """From the first gradient of an output until those of the inputs are there."""
    REDUCED = auto()
    """Gradients have been handed to the reduction; until the end of backward."""


class GradientPlace(Enum):
    """Where the unreduced gradients of a bucket are until they are reduced."""

    APART = auto()
    """Copied to memory of their own as they come: parameters stay gathered, or gradients add up over backwards."""
    HELD = auto()
    """In autograd's own tensors until parameters are resharded, and then copied to where those were."""
    IN_PLACE = auto()
    """Copied to where their parameters were, as they come if :meth:`FSDPModule.set_in_place_gradients` says so."""
