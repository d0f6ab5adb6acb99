"""Changes to PyTorch that can be taken back exactly: attributes, entries of tables, functions wherever modules hold them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

__all__ = ["HOOKS", "Changes"]

# What runs in the places that are patched, by part ("placements", "models", "random"), of the parts that are installed.
HOOKS: dict[str, Any] = {}

_ABSENT = object()


class Changes:
    """Changes in the order in which they were made. :meth:`undo` takes them back in the opposite order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an object, a class or a module. An inherited one becomes inherited again."""
        self._undo.append(partial(_restore_attribute, owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def entry(self, table: Callable[[], dict[Any, Any]], key: Any, value: Any) -> None:
        """Set an entry of a dictionary. ``table`` returns it each time: others may put another one in its place."""
        self._undo.append(partial(_restore_entry, table, key, table().get(key, _ABSENT)))
        table()[key] = value

    def function(self, original: Any, replacement: Any) -> None:
        """Replace a function in every module that holds it, under whatever name: its own, PyTorch's others, and those of
        programs that imported it before. Modules that are loaded later import the replacement."""
        self._undo.append(partial(_rebind, replacement, original))
        _rebind(original, replacement)

    def on_undo(self, function: Callable[[], None]) -> None:
        self._undo.append(function)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


def _restore_attribute(owner: Any, name: str, before: Any) -> None:
    if before is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


def _restore_entry(table: Callable[[], dict[Any, Any]], key: Any, before: Any) -> None:
    if before is _ABSENT:
        table().pop(key, None)
    else:
        table()[key] = before


def _rebind(old: Any, new: Any) -> None:
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            names = vars(module)
            for name in [name for name, value in list(names.items()) if value is old]:
                names[name] = new
