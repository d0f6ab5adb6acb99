"""Tensors inside the arguments and results of modules."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["map_tensors", "tensors_in"]


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``value`` with every tensor in nested tuples, lists, mappings and dataclasses replaced.

    A container is rebuilt, as its own type, only when something inside it changed. Any other object (a key/value cache, a
    configuration) is returned as it is: it has an identity that the model may rely on.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        items = [map_tensors(change, item) for item in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
            return type(value)(*items)
        return type(value)(items)
    if isinstance(value, Mapping):
        changed = {key: map_tensors(change, item) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        if type(value) is dict:
            return changed
        rebuilt: Any = copy.copy(value)  # Hugging Face's outputs are dictionaries with attributes; keep their type
        for key, item in changed.items():
            rebuilt[key] = item
        return rebuilt
    if _is_dataclass(value):
        held = dict(_fields(value))
        changed = {key: map_tensors(change, item) for key, item in held.items()}
        if all(changed[key] is item for key, item in held.items()):
            return value
        rebuilt = copy.copy(value)
        for key, item in changed.items():
            object.__setattr__(rebuilt, key, item)  # also a frozen one
        return rebuilt
    return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that :func:`map_tensors` would visit."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif _is_dataclass(value):
        for _, item in _fields(value):
            yield from tensors_in(item)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type | torch.nn.Module)


def _fields(value: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
