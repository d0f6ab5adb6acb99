"""Tensors inside the arguments and results of modules."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

__all__ = ["hides_tensors", "map_tensors", "tensors_in"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Tensor)

_WITHOUT_TENSORS = frozenset(_PLAIN) - {torch.Tensor}


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``value`` with every tensor in nested tuples, lists, mappings and dataclasses replaced.

    A container is rebuilt, as its own type, only when something inside it changed; mappings and dataclasses by a copy, for
    constructors may check, or lose what they were not told of. Any other object (a key/value cache, a configuration) is
    returned as it is: it has an identity that the model may rely on.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        items = [map_tensors(change, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    held = dict(value) if isinstance(value, Mapping) else _fields(value)
    changed = {key: map_tensors(change, item) for key, item in held.items()}
    changed = {key: item for key, item in changed.items() if item is not held[key]}
    if not changed:
        return value
    if isinstance(value, MutableMapping):
        rebuilt: Any = copy.copy(value)  # Hugging Face's outputs are dictionaries with attributes; keep their type
        for key, item in changed.items():
            rebuilt[key] = item
        return rebuilt
    if isinstance(value, Mapping):
        return type(value)({**held, **changed})  # type: ignore[call-arg]
    rebuilt = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(rebuilt, name, item)  # also a frozen one
    return rebuilt


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that :func:`map_tensors` would visit."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        yield value
    elif kind in _WITHOUT_TENSORS:
        return
    elif kind is tuple or isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    else:
        for item in (value if kind is dict or isinstance(value, Mapping) else _fields(value)).values():
            yield from tensors_in(item)


def hides_tensors(value: Any) -> bool:
    """Whether there is an object in ``value`` that :func:`map_tensors` does not look into, and that may hold tensors."""
    if isinstance(value, _PLAIN):
        return False
    if isinstance(value, list | tuple):
        return any(map(hides_tensors, value))
    if isinstance(value, Mapping):
        return any(map(hides_tensors, value.values()))
    fields = _fields(value)
    return any(map(hides_tensors, fields.values())) if fields else not isinstance(value, type)


def _fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass; of anything else none."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type | torch.nn.Module):
        return {}
    names = [field.name for field in dataclasses.fields(value)]
    try:  # without the class's own access: configurations refuse to read some of their fields
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:  # it has slots
        return {name: getattr(value, name, None) for name in names}
    return {name: held.get(name) for name in names}
