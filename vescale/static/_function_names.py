"""Names of torch functions in a record. Reading one looks it up in a table, and runs nothing."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import get_ignored_functions, get_overridable_functions, resolve_name

from vescale.errors import StaticRecordError


@functools.cache
def _functions() -> dict[str, Any]:
    """All functions that a mode for torch functions can see, by name."""
    return dict(_named())


def _named() -> Iterator[tuple[str, Any]]:
    for functions in get_overridable_functions().values():
        for function in functions:
            name = resolve_name(function)
            if name is not None:
                yield name, function
    ignored = get_ignored_functions()  # factories, which take no tensors
    for prefix, holder in (("torch", torch), ("torch.Tensor", torch.Tensor)):
        for name in dir(holder):
            function = getattr(holder, name)
            if isinstance(function, types.BuiltinFunctionType | types.MethodDescriptorType) and function in ignored:
                yield f"{prefix}.{name}", function


@functools.cache
def _names() -> dict[Any, str]:
    return {function: name for name, function in reversed(_functions().items())}


def function_name(function: Any) -> str:
    """Raises StaticRecordError for a function that has no name."""
    name = _names().get(function)
    if name is None:
        raise StaticRecordError(
            f"the function {getattr(function, '__name__', function)} has no name by which another process could find it; "
            "this model cannot be written to a record, and runs in static mode as it does now"
        )
    return name


def function_named(name: str) -> Any:
    """Raises StaticRecordError for a name that is none of a torch function."""
    function = _functions().get(name)
    if function is None:
        raise StaticRecordError(f"{name!r} is not the name of a torch function; record the model again")
    return function
