"""Changes to PyTorch that can be taken back exactly: attributes, entries of tables, functions wherever modules hold them.

:class:`Changes` makes them and keeps the name of each, so that the table of patches lists what is changed, not what
somebody wrote down.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from types import ModuleType
from typing import Any, TypeVar

from vescale import csrc

# What runs in the places that are patched, by part ("placements", "models", "random"), of the parts that are installed.
HOOKS: dict[str, Any] = {}

_ABSENT = object()
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Changes:
    """Changes in the order in which they were made. :func:`undo` takes them back in the opposite order.

    Attributes:
        functions: those that :func:`rebind` replaces, with what comes in their place.
        targets: the name of each thing that is changed, in the order of the changes; a function gives names that are only
            known once all changes are made (of kernels that C++ registers).
    """

    def __init__(self) -> None:
        self.functions: list[tuple[Any, Any]] = []
        self.targets: list[str | Callable[[], Sequence[str]]] = []
        self._undo: list[Callable[[], None]] = []

    def attribute(self, owner: Any, name: str, value: Any, owner_name: str = "") -> None:
        """Set an attribute of an object, a class or a module. An inherited one becomes inherited again.

        ``owner_name`` says where programs find an object that is neither a class nor a module.
        """
        self.targets.append(f"{owner_name or name_of(owner)}.{name}")
        self._undo.append(partial(_restore_attribute, owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def entry(self, table: Callable[[], dict[Any, Any]], key: Any, value: Any, table_name: str) -> None:
        """Set an entry of a dictionary. ``table`` returns it each time: others may put another one in its place."""
        self.targets.append(f"{table_name}[{key}]")
        self._undo.append(partial(_restore_entry, table, key, table().get(key, _ABSENT)))
        table()[key] = value

    def function(self, original: Any, replacement: Any) -> None:
        """Replace a function, when :func:`rebind` is called, in every module that holds it, under whatever name: its own,
        PyTorch's others, and those of programs that imported it before. Modules that are loaded later import the
        replacement."""
        self.targets.append(name_of(original))
        self.functions.append((original, replacement))

    def method(self, owner: Any, name: str, owner_name: str = "") -> Callable[[_Function], _Function]:
        """Decorator: :meth:`attribute`, for a function with the name and the description of the one that is there; static
        where that is."""
        original = inspect.getattr_static(owner, name)

        def decorate(function: _Function) -> _Function:
            update_wrapper(function, getattr(owner, name))
            value = staticmethod(function) if isinstance(original, staticmethod) else function
            self.attribute(owner, name, value, owner_name)
            return function

        return decorate

    def in_place_of(self, original: Any) -> Callable[[_Function], _Function]:
        """Decorator: :meth:`function`, with the name and the description of the original."""

        def decorate(function: _Function) -> _Function:
            self.function(original, update_wrapper(function, original))
            return function

        return decorate

    def on_undo(self, function: Callable[[], Any], *targets: str | Callable[[], Sequence[str]]) -> None:
        """Call ``function`` to take back another kind of change, of ``targets``."""
        self.targets.extend(targets)
        self._undo.append(function)

    def names(self) -> list[str]:
        """The name of each thing that is changed, once."""
        found = [[target] if isinstance(target, str) else target() for target in self.targets]
        return list(dict.fromkeys(name for names in found for name in names))

    def restore(self) -> None:
        """Take back all but the functions."""
        while self._undo:
            self._undo.pop()()
        self.targets.clear()


def name_of(owner: Any) -> str:
    """The dotted name of a module, a class or a function; of another object, that of its class."""
    if isinstance(owner, ModuleType):
        return owner.__name__
    if not isinstance(owner, type) and not inspect.isroutine(owner):
        owner = type(owner)
    return f"{owner.__module__}.{owner.__qualname__}"


def rebind(*made: Changes) -> None:
    """Replace the functions of all these changes: all modules of the program are gone through once."""
    _rebind([pair for changes in made for pair in changes.functions])


def undo(*made: Changes) -> None:
    """Take these changes back, the last ones first."""
    _rebind([(replacement, original) for changes in made for original, replacement in changes.functions])
    for changes in reversed(made):
        changes.functions.clear()
        changes.restore()


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


def _rebind(pairs: Sequence[tuple[Any, Any]]) -> None:
    new = {id(old): replacement for old, replacement in pairs}
    assert len(new) == len(pairs), "two changes replace the same function"
    for old, replacement in pairs:
        while id(replacement) in new:  # what was put in place last goes back to what was there first
            replacement = new[id(replacement)]
        new[id(old)] = replacement
    if not new:
        return
    for names, name in _holders([old for old, _ in pairs]):
        names[name] = new.get(id(names[name]), names[name])  # a module may be there twice, under several names


def _holders(functions: Sequence[Any]) -> list[tuple[dict[str, Any], str]]:
    """Where modules hold one of these functions: the namespace and the name. In C++ (``csrc/patching.cpp``), where it is
    built: Python counts a reference to every value, by which a forked process copies most of its memory."""
    native = csrc.load_module("patching")
    if native is not None:
        found: list[tuple[dict[str, Any], str]] = native.holders(sys.modules, functions)
        return found
    wanted = set(map(id, functions))
    spaces = [vars(module) for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    return [(names, name) for names in spaces for name, value in list(names.items()) if id(value) in wanted]
