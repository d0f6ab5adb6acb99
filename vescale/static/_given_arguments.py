"""What a torch function was given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_MISSING = object()


def num_values(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many arguments are tensors, lists of tensors, or fractions. Wrappers in Python pass on what they have by default,
    which nobody gave."""
    defaults = _defaults(function) if kwargs else {}
    given = [*args, *(value for name, value in kwargs.items() if value is not defaults.get(name, _MISSING))]
    return sum(map(_is_value, given))


def held_in(value: Any) -> Iterator[Any]:
    """What lists and dictionaries hold, in order."""
    if isinstance(value, dict):
        yield tuple(value)
    if isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield id(item) if isinstance(item, torch.Tensor) else type(item)
            yield from held_in(item)


def is_fraction(value: Any) -> bool:
    """Whether something is a number that is not whole, and so neither a dim nor a size."""
    return type(value) is float and not value.is_integer()


def _is_value(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(item, torch.Tensor) for item in value)
    return isinstance(value, torch.Tensor) or is_fraction(value)


@functools.lru_cache(maxsize=4096)
def _defaults(function: Any) -> Mapping[str, Any]:
    """Of a function in Python, by name."""
    if not hasattr(function, "__code__"):
        return {}
    return {one.name: one.default for one in inspect.signature(function).parameters.values()}
