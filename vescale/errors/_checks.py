"""Errors of scripts around a model."""

from __future__ import annotations

from vescale.errors._coded import Coded

__all__ = [
    "AdoptionError",
]


class AdoptionError(Coded, ValueError):
    """`parallelize(..., optimizer=)` was given an optimizer that cannot be adopted."""

    code = "VS0304"
