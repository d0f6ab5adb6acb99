"""Mistakes of the script around a model that would end in wrong numbers or a hang: found, and told with the edit."""

from vescale.checks._adopted_optimizers import adopt_optimizers, listed_optimizers
from vescale.checks._replaced_parameters import (
    RegisteredParameters,
    ReplacedParameterError,
    Replacement,
    replacement_of,
)

__all__ = [
    "RegisteredParameters",
    "ReplacedParameterError",
    "Replacement",
    "adopt_optimizers",
    "listed_optimizers",
    "replacement_of",
]
