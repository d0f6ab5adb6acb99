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
        return self.holder if isinstance(self.holder, list | MutableMapping) else self.holder.__dict__


def hidden_slots(value: Any) -> list[Slot]:
    """Where objects in ``value`` that are no containers hold tensors, in an order that depends on nothing else.

    Raises ValueError where a tensor cannot be exchanged.
    """
    return list(_slots(value, False, set()))


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
        is_hidden, items = True, list(getattr(value, "__dict__", {}).items())
    for key, item in items:
        if isinstance(item, torch.Tensor):
            if is_hidden and isinstance(value, tuple):
                raise ValueError("a tuple in an object holds tensors")
            if is_hidden:
                yield Slot(value, key)
        else:
            yield from _slots(item, is_hidden, seen)
