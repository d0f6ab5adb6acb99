"""``PythonState``: what a forward changes besides tensors of its modules, and holds again before the forward is repeated."""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale.compat import local_of, no_torch_function, versions

__all__ = ["MISSING", "PythonState", "StateObjects"]

MISSING = object()
_MAX_BYTES = 1 << 20  # of an array that is compared


class PythonState:
    """Containers, attributes, globals, generators and other tensors that the recorded forward has changed."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, Any], tuple[Any, Any]] = {}

    def add(self, holder: Any, name: Any = None) -> None:
        """A container or an object, or what it has under a name."""
        self._places[id(holder), name] = holder, name

    def saved(self) -> list[Callable[[], None]]:
        """What brings back the state of now."""
        return [_saved(holder, name) for holder, name in self._places.values()]


class StateObjects:
    """Generators of random numbers, arrays and tensors that a forward may reach, and their states; and iterators, of which
    nobody knows the state."""

    def __init__(self) -> None:
        self._objects: list[tuple[Any, Any]] = []
        self.iterators: list[tuple[str, str]] = []  # the names of holders, and their own

    def add(self, where: str, name: str, value: Any) -> None:
        """``name``: the attribute, global or variable that holds ``value``."""
        state = _state(value)
        if state is not None:
            self._objects.append((value, state))
        elif isinstance(value, Iterator):
            self.iterators.append((where, name))

    def changed(self) -> list[Any]:
        return [value for value, state in self._objects if _state(value) != state]


def _state(value: Any) -> Any:
    """What tells whether a tensor, an array or a generator has changed; None: it is something else."""
    if isinstance(value, torch.Tensor):
        return None if value.is_inference() else versions(value)
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if hasattr(value, "__array_interface__") and not isinstance(value, type):
        return hash(value.tobytes()) if value.nbytes <= _MAX_BYTES else None
    bits = _bit_generator(value)
    return None if bits is None else repr(bits.state)


def _bit_generator(value: Any) -> Any:
    """Of numpy's generators."""
    found = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)
    return found if hasattr(found, "state") else None


def _saved(holder: Any, name: Any) -> Callable[[], None]:
    if name is not None:
        return _saved_entry(holder, name)
    if isinstance(holder, torch.Tensor):
        with torch.no_grad(), no_torch_function():
            kept = _local(holder).clone()
        return lambda: _copy(holder, kept)
    if isinstance(holder, torch.Generator):
        return functools.partial(_call, holder.set_state, holder.get_state())
    if isinstance(holder, random.Random):
        return functools.partial(_call, holder.setstate, holder.getstate())
    bits = _bit_generator(holder)
    if bits is not None:
        return _saved_entry(bits, "state")
    items = holder.copy()
    return lambda: _refill(holder, items)


def _saved_entry(holder: Any, name: Any) -> Callable[[], None]:
    if isinstance(holder, dict):
        value = dict.get(holder, name, MISSING)
        return lambda: _set_entry(holder, name, value)
    if isinstance(holder, types.CellType):
        name = "cell_contents"
    kept = getattr(holder, name)
    return lambda: setattr(holder, name, kept)


def _call(function: Callable[[Any], Any], value: Any) -> None:
    function(value)


def _set_entry(held: dict[Any, Any], name: Any, value: Any) -> None:
    if value is MISSING:
        dict.pop(held, name, None)
    else:
        dict.__setitem__(held, name, value)


def _copy(x: torch.Tensor, kept: torch.Tensor) -> None:
    with torch.no_grad(), no_torch_function():
        _local(x).copy_(kept)


def _local(x: torch.Tensor) -> torch.Tensor:
    return local_of(x) if isinstance(x, DTensor) else x


def _refill(holder: Any, items: Any) -> None:
    """The same container with these items."""
    if isinstance(holder, list):
        list.__setitem__(holder, slice(None), items)
    elif isinstance(holder, dict):
        dict.clear(holder)
        dict.update(holder, items)
    elif isinstance(holder, set):
        set.clear(holder)
        set.update(holder, items)
    elif isinstance(holder, deque):
        deque.clear(holder)
        deque.extend(holder, items)
    else:
        holder[...] = items
