"""The type of a value, as messages name it."""

from __future__ import annotations

from typing import Any

__all__ = ["kind_of"]


def kind_of(value: Any) -> str:
    """``a Linear``, ``an int``."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"
