"""Contents of the objects that a program keeps state in: attributes, items, states of generators; read, and put back."""

from __future__ import annotations

import dis
import functools
import operator
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from vescale.compat import CALL_OVERRIDE

__all__ = [
    "ATTRIBUTES",
    "CELL",
    "HOST_GENERATORS",
    "OF_MODULES",
    "Kind",
    "globals_of",
    "has_attributes",
    "is_same",
    "kind_of",
    "named_items",
]

_SMALL = 1 << 16  # bytes of an array that is looked at
OF_MODULES = frozenset((*vars(nn.Module()), "forward", CALL_OVERRIDE)) - {"training"}
"""Attributes where modules keep parameters, children and hooks, and what runs in place of their forward."""

HOST_GENERATORS = tuple(function.__self__ for function in (random.getstate, np.random.get_state))  # type: ignore[union-attr]
"""Those of ``random`` and of ``numpy.random``."""


@dataclass(frozen=True)
class Kind:
    """How the content of an object is read and put. ``draws``: a generator, which changes if it is used; ``has_values``:
    the content is a dictionary, or a list, of what the object holds."""

    read: Callable[[Any], Any]
    put: Callable[[Any, Any], None]
    draws: bool = False
    has_values: bool = True


def is_same(one: Any, other: Any) -> bool:
    """Of two contents of an object: values by identity."""
    if isinstance(one, dict):
        return (
            len(one) == len(other) and all(map(operator.is_, one.values(), other.values())) and list(one) == list(other)
        )
    if type(one) in (list, deque):
        return len(one) == len(other) and all(map(operator.is_, one, other))
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


def _attributes(item: Any) -> dict[str, Any]:
    found = dict(vars(item)) if hasattr(item, "__dict__") else {}
    found.update((name, getattr(item, name)) for name in _slots(item) if hasattr(item, name))
    return found


def _put_attributes(item: Any, content: dict[str, Any]) -> None:
    held, slots = getattr(item, "__dict__", {}), _slots(item)
    is_module = isinstance(item, nn.Module)
    for name in [name for name in held if name not in content and not (is_module and name in OF_MODULES)]:
        del held[name]
    for name, value in content.items():
        if name in slots:
            object.__setattr__(item, name, value)
        elif not is_module or name not in OF_MODULES:
            held[name] = value


def _slots(item: Any) -> tuple[str, ...]:
    kind: Any = type(item)
    return _slots_of(kind)


@functools.cache
def _slots_of(kind: Any) -> tuple[str, ...]:
    found = [base.__dict__.get("__slots__", ()) for base in kind.__mro__]
    names = [name for each in found for name in ((each,) if isinstance(each, str) else each)]
    return tuple(name for name in names if not name.startswith("__"))


def _items_of(names: Sequence[str], held: Mapping[str, Any]) -> dict[str, Any]:
    return {name: held[name] for name in names if name in held}


@functools.cache
def globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a function names."""
    names = (i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME"))
    return tuple(dict.fromkeys(names))


def _put_dict(item: dict[Any, Any], content: Mapping[Any, Any]) -> None:
    kind = OrderedDict if isinstance(item, OrderedDict) else dict  # without a subclass's own methods
    kind.clear(item)
    for key, value in content.items():
        kind.__setitem__(item, key, value)


def _put_list(item: list[Any], content: list[Any]) -> None:
    list.__setitem__(item, slice(None), content)


def _put_set(item: set[Any], content: set[Any]) -> None:
    set.clear(item)
    set.update(item, content)


def _put_deque(item: deque[Any], content: deque[Any]) -> None:
    deque.clear(item)
    deque.extend(item, content)


def _put_array(item: Any, content: Any) -> None:
    item[...] = content


def _cell(item: types.CellType) -> list[Any]:
    return [item.cell_contents]


def _put_cell(item: types.CellType, content: list[Any]) -> None:
    (item.cell_contents,) = content


def _torch_state(item: torch.Generator) -> bytes:
    return item.get_state().numpy().tobytes()


def _put_torch_state(item: torch.Generator, content: bytes) -> None:
    item.set_state(torch.frombuffer(bytearray(content), dtype=torch.uint8))


@dataclass(frozen=True)
class _NumpyState:
    """Of a generator. ``values`` tell it from others."""

    values: Any
    state: Any = field(compare=False)


def _numpy_state(item: Any) -> _NumpyState:
    state = item.get_state() if isinstance(item, np.random.RandomState) else item.bit_generator.state
    return _NumpyState(_comparable(state), state)


def _comparable(state: Any) -> Any:
    if isinstance(state, dict | tuple):
        return tuple(map(_comparable, state.values() if isinstance(state, dict) else state))
    return state.tobytes() if isinstance(state, np.ndarray) else state


def _put_numpy_state(item: Any, content: _NumpyState) -> None:
    if isinstance(item, np.random.RandomState):
        item.set_state(content.state)
    else:
        item.bit_generator.state = content.state


ATTRIBUTES, CELL = Kind(_attributes, _put_attributes), Kind(_cell, _put_cell)
_KINDS: dict[type, Kind] = {
    dict: Kind(dict, _put_dict),
    list: Kind(list, _put_list),
    deque: Kind(deque, _put_deque),
    set: Kind(set, _put_set, has_values=False),
    np.ndarray: Kind(np.array, _put_array, has_values=False),
    torch.Generator: Kind(_torch_state, _put_torch_state, draws=True, has_values=False),
    random.Random: Kind(random.Random.getstate, random.Random.setstate, draws=True, has_values=False),
    np.random.Generator: Kind(_numpy_state, _put_numpy_state, draws=True, has_values=False),
    np.random.RandomState: Kind(_numpy_state, _put_numpy_state, draws=True, has_values=False),
}


def kind_of(item: Any) -> Kind | None:
    """Of a container, an array or a generator; None for anything else, and for large arrays."""
    found = next((base for base in type(item).__mro__ if base in _KINDS), None)
    if found is None or (found is np.ndarray and (item.nbytes > _SMALL or item.dtype.hasobject)):
        return None
    return _KINDS[found]


def named_items(names: Sequence[str]) -> Kind:
    """Of a dictionary, of which only these are a part."""
    return Kind(functools.partial(_items_of, tuple(names)), dict.update)


def has_attributes(item: Any) -> bool:
    return hasattr(item, "__dict__") or bool(_slots(item))
