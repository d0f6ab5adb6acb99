"""``living_items``: reading a weak table while other threads write to it."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

__all__ = ["living_items"]

K = TypeVar("K")
V = TypeVar("V")

_GONE: Any = object()


def living_items(table: weakref.WeakKeyDictionary[K, V]) -> list[tuple[K, V]]:
    """What is in the table now. Its own iterators run Python between two items, and an entry that another thread adds
    meanwhile ends them with a RuntimeError."""
    keys = [key for reference in table.keyrefs() if (key := reference()) is not None]
    found = [(key, table.get(key, _GONE)) for key in keys]
    return [(key, value) for key, value in found if value is not _GONE]
