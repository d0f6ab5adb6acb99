"""``WatchedState``: what a forward changes in Python, and holds again before it is repeated."""

from __future__ import annotations

import functools
import io
import operator
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from vescale.compat import CALL_OVERRIDE, no_torch_function, own_part, versions
from vescale.static._record import is_of_model

_MISSING = object()
_MAX_BYTES = 1 << 20  # of an array that is compared
_MAX_ITEMS = 1 << 14  # of a container
_MAX_DEPTH = 8
_SKIPPED = frozenset((*nn.Module().__dict__, "forward", CALL_OVERRIDE)) - {"training"}
_ATOMS = (type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device)


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


class WatchedState:
    """Attributes of modules and their classes, globals of the files in which these are, closures, and what containers and
    objects in them hold; those that code outside of these files changes are not seen.

    Attributes:
        entries: (holder, name, value): of dictionaries, classes, cells and objects with slots.
        containers: with what they held.
        objects: generators, arrays and tensors, with their states; iterators, with their names.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._entries: list[tuple[Any, Any, Any]] = []
        self._containers: list[tuple[Any, list[Any]]] = []
        self._objects: list[tuple[Any, Any]] = []
        self._iterators: list[tuple[str, Any, Any]] = []
        self._seen: dict[int, Any] = {}  # by id of what has been visited, which the value keeps alive
        for path, module in modules:
            own = {name: value for name, value in module.__dict__.items() if name not in _SKIPPED}
            self._add_entries(module.__dict__, own, 0, path or "the model")
            for kind in type(module).__mro__:
                self._add_class(kind)

    def add_frame(self, frame: types.FrameType) -> None:
        """Of a function of the model that is about to call a torch function: its globals."""
        self._add_globals(frame.f_globals)

    def changed(self) -> PythonState:
        """What is not as it was."""
        found = PythonState()
        for holder, name, value in self._entries:
            if not _is_same(_read(holder, name), value):
                found.add(holder, name)
        for held, items in self._containers:
            if len(held) != len(items) or not all(map(_is_same, held, items)):
                found.add(held)
        for value, state in self._objects:
            if _state(value) != state:
                found.add(value)
        return found

    def advanced(self) -> str:
        """The name of an iterator that is not, or may not be, where it was; "" if there is none."""
        return next((name for name, it, state in self._iterators if state is None or _position(it) != state), "")

    def _add_class(self, kind: type) -> None:
        held = getattr(sys.modules.get(kind.__module__), "__dict__", {})
        if id(kind) in self._seen or not is_of_model(held.get("__file__") or ""):
            return
        self._seen[id(kind)] = kind
        for name, value in list(vars(kind).items()):
            if type(value) is types.FunctionType:
                self._add_function(value)
            elif not name.startswith("__") and not callable(value):
                self._entries.append((kind, name, value))
                self._add(value, 1, f"{kind.__name__}.{name}")
        self._add_globals(held)

    def _add_globals(self, held: dict[str, Any]) -> None:
        if id(held) in self._seen or not is_of_model(held.get("__file__") or ""):
            return
        self._seen[id(held)] = held
        own = {k: v for k, v in held.items() if not k.startswith("__") and not isinstance(v, types.ModuleType | type)}
        self._add_entries(held, own, 0, "the globals")

    def _add_function(self, function: types.FunctionType) -> None:
        """What it finds in its closure."""
        if id(function) in self._seen:
            return
        self._seen[id(function)] = function
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            value = _read(cell, "cell_contents")
            self._entries.append((cell, "cell_contents", value))
            self._add(value, 1, f"{name} in the closure of {function.__name__}")

    def _add_entries(self, holder: dict[Any, Any], entries: dict[Any, Any], depth: int, name: str) -> None:
        for key, value in entries.items():
            self._entries.append((holder, key, value))
            if type(value) not in _ATOMS:
                self._add(value, depth + 1, f"{key} of {name}")

    def _add(self, value: Any, depth: int, name: str) -> None:
        if type(value) in _ATOMS or depth > _MAX_DEPTH or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module | type | types.ModuleType):
            return
        if type(value) is types.FunctionType:
            self._add_function(value)
            return
        state = _state(value)
        if state is not None:
            self._objects.append((value, state))
        elif isinstance(value, dict) and len(value) <= _MAX_ITEMS:
            self._containers.append((value, list(value)))
            self._add_entries(value, dict(dict.items(value)), depth, name)
        elif isinstance(value, list | tuple | set | deque) and len(value) <= _MAX_ITEMS:
            if not isinstance(value, tuple):
                self._containers.append((value, list(value)))
            for item in value:
                self._add(item, depth + 1, name)
        elif isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            self._iterators.append((name, value, _position(value)))
        elif isinstance(value, functools.partial):
            self._add((value.func, value.args, value.keywords), depth, name)
        elif _is_of_model(value):
            for slot in (name for kind in type(value).__mro__ for name in _slots(kind)):
                self._entries.append((value, slot, _read(value, slot)))
            held = getattr(value, "__dict__", None)
            if type(held) is dict:
                self._containers.append((held, list(held)))
                self._add_entries(held, dict(held), depth, name)


def _is_same(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and type(now) in _ATOMS and bool(now == before))


def _read(holder: Any, name: Any) -> Any:
    """Of a dictionary, a class, a cell or an object with slots; a mark where there is none."""
    if isinstance(holder, dict):
        return dict.get(holder, name, _MISSING)
    if isinstance(holder, type):
        return vars(holder).get(name, _MISSING)
    try:
        return getattr(holder, name, _MISSING)
    except ValueError:  # an empty cell
        return _MISSING


def _is_of_model(value: Any) -> bool:
    """Whether an object is one of the model's: a configuration, a namespace."""
    package = type(value).__module__.partition(".")[0]
    if type(value).__name__ in ("SimpleNamespace", "Namespace"):
        return True
    return package not in ("torch", "vescale", "builtins", "numpy") and package not in sys.stdlib_module_names


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return tuple(name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__"))


def _position(iterator: Any) -> Any:
    """What tells whether an iterator has advanced; None: nothing does."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, repr(frame.f_locals))
    shown, left = repr(iterator), operator.length_hint(iterator, -1)
    return None if left < 0 and " object at " in shown else (shown, left)


def _state(value: Any) -> Any:
    """What tells whether a tensor, an array or a generator has changed; None: it is something else."""
    if isinstance(value, torch.Tensor):
        return None if value.is_inference() else versions(value)
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return hash(value.tobytes()) if value.nbytes <= _MAX_BYTES else None
    bits = _bit_generator(value)
    return None if bits is None else repr(bits.state)


def _bit_generator(value: Any) -> Any:
    """Of numpy's generators."""
    if type(value).__module__.partition(".")[0] != "numpy":
        return None
    found = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)
    return found if hasattr(found, "state") else None


def _saved(holder: Any, name: Any) -> Callable[[], None]:
    if name is not None:
        return functools.partial(_write, holder, name, _read(holder, name))
    if isinstance(holder, torch.Tensor):
        with torch.no_grad(), no_torch_function():
            kept = own_part(holder).clone()
        return functools.partial(_copy, holder, kept)
    if isinstance(holder, torch.Generator):
        return functools.partial(_call, holder.set_state, holder.get_state())
    if isinstance(holder, random.Random):
        return functools.partial(_call, holder.setstate, holder.getstate())
    bits = _bit_generator(holder)
    if bits is not None:
        return functools.partial(setattr, bits, "state", bits.state)
    return functools.partial(_refill, holder, holder.copy())


def _write(holder: Any, name: Any, value: Any) -> None:
    if isinstance(holder, dict):
        if value is _MISSING:
            dict.pop(holder, name, None)
        else:
            dict.__setitem__(holder, name, value)
    elif value is not _MISSING:
        setattr(holder, name, value)
    elif _read(holder, name) is not _MISSING:
        delattr(holder, name)


def _call(function: Callable[[Any], Any], value: Any) -> None:
    function(value)


def _copy(x: torch.Tensor, kept: torch.Tensor) -> None:
    with torch.no_grad(), no_torch_function():
        own_part(x).copy_(kept)


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
