"""Weak tables that several packages have in common, and how one is read while other threads write to it."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

from torch import nn

__all__ = ["AVERAGED_MODULES", "living_items"]

AVERAGED_MODULES: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Those whose parameters are averages for the moment, and no state to go on training from."""

K = TypeVar("K")
V = TypeVar("V")

_GONE: Any = object()


def living_items(table: weakref.WeakKeyDictionary[K, V]) -> list[tuple[K, V]]:
    """What is in the table now. Its own iterators run Python between two items, and an entry that another thread adds
    meanwhile ends them with a RuntimeError."""
    keys = [key for reference in table.keyrefs() if (key := reference()) is not None]
    found = [(key, table.get(key, _GONE)) for key in keys]
    return [(key, value) for key, value in found if value is not _GONE]
