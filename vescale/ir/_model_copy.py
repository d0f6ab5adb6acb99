"""``copy_model``: a deep copy whose functions use the modules of the copy.

``copy.deepcopy`` takes a function as it is. One that an attribute holds, such as minGPT's ``self.mlpf``, a lambda that calls
modules of its closure, would go on calling those of the original.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, TypeVar

from torch import nn

Model = TypeVar("Model", bound=nn.Module)

_OF_MODULES = ("_modules", "_parameters", "_buffers")


def copy_model(model: Model, memo: dict[int, Any] | None = None) -> Model:
    """As ``copy.deepcopy(model, memo)``. Functions in attributes of modules, in containers there and inside of each other
    see copies in their closures and defaults."""
    rebinding = _Rebinding({} if memo is None else memo)
    copied = deepcopy(model, rebinding.memo)
    for module in copied.modules():
        own = {name: value for name, value in module.__dict__.items() if name not in _OF_MODULES}
        module.__dict__.update({name: rebinding.of(value) for name, value in own.items()})
    return copied


class _Rebinding:
    """What a copy has in place of what the original has: ``memo``, as ``copy.deepcopy`` fills it, and functions."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self.memo = memo
        self._functions: dict[int, types.FunctionType] = {}

    def of(self, value: Any) -> Any:
        """An attribute of the copy, with functions that see the copy."""
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType) and isinstance(value.__func__, types.FunctionType):
            return types.MethodType(self._function(value.__func__), value.__self__)
        if type(value) is functools.partial:
            return functools.partial(self.of(value.func), *map(self.of, value.args), **self._dict(value.keywords))
        if type(value) in (list, tuple):
            found = [self.of(each) for each in value]
            return value if all(map(_same, found, value)) else type(value)(found)
        if isinstance(value, dict):
            for key, each in list(value.items()):
                if (changed := self.of(each)) is not each:
                    value[key] = changed
        return value

    def _held(self, value: Any) -> Any:
        """What a function of the original holds: what the copy has in its place."""
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if id(value) in self.memo:
            return self.memo[id(value)]
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self._held(value.__self__))
        if type(value) is functools.partial:
            arguments = [self._held(each) for each in value.args]
            return functools.partial(self._held(value.func), *arguments, **self._held(value.keywords))
        if type(value) in (list, tuple, dict):
            values = list(value.values()) if isinstance(value, dict) else value
            found = [self._held(each) for each in values]
            if all(map(_same, found, values)):
                return value
            return dict(zip(value, found)) if isinstance(value, dict) else type(value)(found)
        return value

    def _dict(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: self.of(value) for key, value in values.items()}

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        known = self._functions.get(id(function))
        if known is not None:
            return known
        cells = function.__closure__ or ()
        copy = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            None,
            tuple(types.CellType() for _ in cells) if cells else None,
        )
        self._functions[id(function)] = self._functions[id(copy)] = copy  # one may hold itself
        changed = False
        for cell, own in zip(cells, copy.__closure__ or ()):
            try:
                content = cell.cell_contents
            except ValueError:  # nothing yet
                continue
            own.cell_contents = self._held(content)
            changed |= own.cell_contents is not content and own.cell_contents is not copy
        copy.__defaults__ = self._held(function.__defaults__)
        copy.__kwdefaults__ = self._held(function.__kwdefaults__)
        changed |= copy.__defaults__ is not function.__defaults__ or copy.__kwdefaults__ is not function.__kwdefaults__
        if not changed:
            self._functions[id(function)] = function
            return function
        copy.__dict__.update(function.__dict__)
        copy.__qualname__, copy.__doc__ = function.__qualname__, function.__doc__
        return copy


def _same(one: Any, other: Any) -> bool:
    return one is other
