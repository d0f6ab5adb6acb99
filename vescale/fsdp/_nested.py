"""Tensors inside of what modules take and return: dicts, lists, tuples, named tuples and dataclasses, nested."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["map_tensors", "tensors_in"]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor, in order; other objects are not looked into."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The same structure with ``function`` of each tensor; what holds no changed tensor is returned as it is."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        items = [map_tensors(function, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*items)
        return type(value)(items)
    if isinstance(value, dict):
        changed = {key: map_tensors(function, item) for key, item in value.items()}
        return _with(value, {key: item for key, item in changed.items() if item is not value[key]}, dict.__setitem__)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        found = {name: getattr(value, name, None) for name in names}
        mapped = {name: map_tensors(function, item) for name, item in found.items()}
        return _with(value, {n: item for n, item in mapped.items() if item is not found[n]}, object.__setattr__)
    return value


def _with(value: Any, changes: dict[Any, Any], put: Callable[..., None]) -> Any:
    """A shallow copy with some items replaced: constructors may check, or lose what they were not told of."""
    if not changes:
        return value
    result = copy.copy(value)
    for key, item in changes.items():
        if isinstance(result, dict) and put is dict.__setitem__:
            result[key] = item
        else:
            put(result, key, item)
    return result
