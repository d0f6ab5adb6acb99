"""Objects among a module's arguments that its forward may write to: key/value caches, dictionaries of results."""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from torch import nn

__all__ = ["copy_state", "held_objects"]

_KEPT = (
    torch.Tensor,
    nn.Module,
    type,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.ModuleType,
)


def held_objects(value: Any) -> dict[int, Any]:
    """By ``id``, the tensors, modules, functions and classes that can be reached from ``value``."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, _KEPT):
            found[id(item)] = item
        elif isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            stack += item
        elif hasattr(item, "__dict__"):
            stack += vars(item).values()
    return found


def copy_state(value: Any) -> tuple[Any, str]:
    """A copy of ``value`` with the same tensors, to be given to a second forward, and an empty text; or, where an object
    cannot be copied, ``value`` itself and why."""
    try:
        return copy.deepcopy(value, held_objects(value)), ""
    except Exception as error:  # whatever an object does when it is copied
        return value, f"{type(error).__name__}: {error}"
