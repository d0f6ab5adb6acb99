"""Tensors inside of objects that a forward makes and returns: caches of keys and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type, nn.Module)


@dataclasses.dataclass(frozen=True)
class Slot:
    """A place in an object that holds a tensor."""

    holder: Any
    key: Any

    def get(self) -> torch.Tensor:
        found: torch.Tensor = self._held()[self.key]
        return found

    def set(self, x: torch.Tensor) -> None:
        self._held()[self.key] = x

    def _held(self) -> Any:
        if isinstance(self.holder, list | MutableMapping):
            return self.holder
        return _Slots(self.holder) if self.key not in getattr(self.holder, "__dict__", {}) else self.holder.__dict__


@dataclasses.dataclass(frozen=True)
class _Slots:
    """The attributes of an object that has no dictionary."""

    of: Any

    def __getitem__(self, name: str) -> Any:
        return getattr(self.of, name)

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self.of, name, value)


def hidden_slots(value: Any) -> list[Slot]:
    """Where objects in ``value`` that are no containers hold tensors, in an order that depends on nothing else.

    Raises ValueError where a tensor cannot be exchanged.
    """
    return list(_slots(value, False, set()))


def _in_slots(value: Any) -> Iterator[tuple[str, Any]]:
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _slots(value: Any, is_hidden: bool, seen: set[int]) -> Iterator[Slot]:
    if isinstance(value, (*_ATOMS, torch.Tensor)) or callable(value) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    elif dataclasses.is_dataclass(value) and not is_hidden:
        items = [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    else:
        is_hidden, items = True, [*getattr(value, "__dict__", {}).items(), *_in_slots(value)]
    for key, item in items:
        if isinstance(item, torch.Tensor):
            if is_hidden and isinstance(value, tuple):
                raise ValueError("a tuple in an object holds tensors")
            if is_hidden:
                yield Slot(value, key)
        else:
            yield from _slots(item, is_hidden, seen)
