"""``ForwardState``: what a forward reads and writes beside its inputs and parameters, as it was before one of its calls.

=============================================  =====================================================================
found from                                     what is kept of it
=============================================  =====================================================================
the module and those in it                     attributes and ``training``; buffers, and frozen parameters that the
                                               forward writes to; whether parameters require gradients
objects and containers that attributes, other  their attributes and items
arguments than tensors, forward hooks, and
globals of ``forward`` hold
modules among these that are not in it         as those in it; of one that contains it, the attributes that these
                                               functions name
classes, and functions and methods that are    attributes of classes, globals, and closures, as far as the code of these
called from there                              functions names them; not those of installed packages
generators among these, and those of           their states, if the forward draws
``random`` and ``numpy.random``
=============================================  =====================================================================

Inside of :meth:`ForwardState.again` the same objects have what they had then; afterwards they have again what they have now.
Contents are kept by reference. Tensors that are written to in place are copied before: small ones in each forward, others if
a call has written to them before. (The first call, and the first in other modes of modules, copies all of them to find out.)
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import enum
import functools
import itertools
import operator
import os
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.compat import CALL_OVERRIDE, local_of, make_dtensor, own_part, spec_of, versions, without_modes
from vescale.errors import RecomputationError

# Contents of the objects that a program keeps state in: attributes, items, states of generators; read, and put back.

_SMALL = 1 << 16  # bytes of an array that is looked at
_UNSET = object()  # what a context variable has that nobody has set
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
def names_in(code: types.CodeType) -> frozenset[str]:
    """The globals and attributes that a function names, and functions in it."""
    inner = (names_in(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return frozenset(code.co_names).union(*inner)


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


def _variable(item: contextvars.ContextVar[Any]) -> list[Any]:
    return [item.get(_UNSET)]


def _put_variable(item: contextvars.ContextVar[Any], content: list[Any]) -> None:
    if content[0] is not _UNSET:
        item.set(content[0])


def _cell(item: types.CellType) -> list[Any]:
    try:
        return [item.cell_contents]
    except ValueError:  # an empty one
        return []


def _put_cell(item: types.CellType, content: list[Any]) -> None:
    for value in content:
        item.cell_contents = value


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
    contextvars.ContextVar: Kind(_variable, _put_variable),
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


def _named_in_class(names: Sequence[str], cls: type) -> dict[str, Any]:
    return _items_of(names, vars(cls))


def _put_in_class(cls: type, content: dict[str, Any]) -> None:
    for name, value in content.items():
        if vars(cls).get(name) is not value:
            type.__setattr__(cls, name, value)


def _named_of_class(names: Sequence[str]) -> Kind:
    return Kind(functools.partial(_named_in_class, tuple(names)), _put_in_class)


def has_attributes(item: Any) -> bool:
    return hasattr(item, "__dict__") or bool(_slots(item))


_LONG = 1 << 12  # items of a container that are not looked into
_MANY = 20_000  # objects that are found
_UNCHANGING = frozenset(
    (
        *(type(None), bool, int, float, complex, str, bytes, range, slice, type, type(Ellipsis), type(NotImplemented)),
        *(types.BuiltinFunctionType, types.ModuleType, torch.dtype, torch.device, torch.Size, torch.layout),
        *(np.dtype, np.ufunc, types.MethodDescriptorType, types.WrapperDescriptorType),
    )
)
# Their objects belong to a library, and are no state of the model.
_LIBRARIES = frozenset(
    (
        "torch",
        "vescale",
        "numpy",
        "logging",
        "threading",
        "concurrent",
        "asyncio",
        "re",
        "typing",
        "inspect",
        "io",
        "abc",
    )
    + ("importlib", "multiprocessing", "ctypes", "weakref", "functools", "contextlib", "itertools", "builtins", "queue")
    + ("lightning", "pytorch_lightning", "accelerate", "datasets", "wandb", "mlflow", "tensorboard", "tqdm", "ray")
)
_STATELESS = (types.FunctionType, type, types.ModuleType, types.BuiltinFunctionType)  # as a rule
_METHODS = (types.FunctionType, staticmethod, classmethod, property)
_STANDARD = os.path.dirname(os.__file__) + os.sep


@functools.cache
def _is_of_library(module: str | None) -> bool:
    """Whether the objects of a module's classes, and what its functions use, are no state of the model."""
    return module is None or module.partition(".")[0] in _LIBRARIES


@functools.cache
def _is_installed(module: str | None) -> bool:
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return _is_of_library(module) or (file is not None and ("site-packages" in file or file.startswith(_STANDARD)))


_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_BUFFERS = Kind(dict, _put_dict)  # and parts; also those that a forward registers
_ITERATORS: frozenset[type] = frozenset(
    (itertools.count, itertools.cycle, type(iter([])), type(iter(())), type(iter(range(0))), types.GeneratorType)
)


class KnownState:
    """What is known of the state of one module's forward.

    Attributes:
        written: by modes of the module and those in it, the names of tensors that calls have written to in place, and the
            numbers of host generators that they have used.
        places: where state is, as of the last search.
    """

    def __init__(self) -> None:
        self.written: dict[bytes, set[Any]] = {}
        self.places: _Places | None = None

    def __deepcopy__(self, memo: Any) -> KnownState:
        return KnownState()  # of a copy of the module, with objects of its own


@dataclass(slots=True)
class _Place:
    """An object with state, and its content when places were searched. ``has_tensors``: it holds some, maybe in tuples."""

    item: Any
    name: str
    kind: Kind
    content: Any
    has_tensors: bool = False

    def value(self, key: Any) -> Any:
        """What it holds now; None where that is nothing."""
        content = self.kind.read(self.item)
        if isinstance(content, dict):
            return content.get(key)
        return content[key] if key < len(content) else None

    def still_leads_to(self, content: Any) -> bool:
        """Whether nothing else that may have state is found from the object than before."""
        before = self.content
        if not self.kind.has_values or (not self.has_tensors and is_same(before, content)):
            return True
        if len(before) != len(content) or (isinstance(before, dict) and before.keys() != content.keys()):
            return False
        return all(
            new is old
            or (type(new) in _UNCHANGING and type(old) in _UNCHANGING)
            or (isinstance(old, _A) and old.like(new))
            for old, new in zip(_values(before), _values(content), strict=True)
        )


@dataclass(frozen=True)
class _A:
    """Stands for a tensor, or an iterator, which is not to be held."""

    kind: type

    def like(self, value: Any) -> bool:
        return isinstance(value, self.kind)


class _Places:
    """Where a forward may find state, beginning from a module, or from arguments."""

    def __init__(self, parts: list[tuple[str, nn.Module]]) -> None:
        self.found: list[_Place] = []
        self._seen = {id(part) for _, part in parts}
        self._left: list[tuple[Any, str]] = []
        self._beside: list[tuple[nn.Module, str]] = []  # modules that are none of the parts
        self._names: set[str] = set()  # what functions name
        self._entered: set[tuple[int, Any]] = set()  # functions with their owners, and holders with names
        self._parts, self._num_hooks = parts, _num_hooks(parts)

    @classmethod
    def of_module(cls, parts: list[tuple[str, nn.Module]]) -> _Places:
        """``parts``: the module and those in it, with their names."""
        places = cls(parts)
        for path, part in parts:
            places._enter_module(part, f"{path}." if path else "")
        own = {id(part) for _, part in parts}
        above = []  # modules that contain one of the parts
        while places._beside:
            module, name = places._beside.pop()
            inner = list(module.modules())
            if own.isdisjoint(map(id, inner)):
                for part in inner:
                    places._enter_module(part, name)
            else:
                above.append((module, name))
            for other, _ in above if not places._beside else ():
                for held in (vars(other), other._buffers, other._modules):
                    places._hold_named(frozenset(places._names - OF_MODULES), held, named_items)
                places._walk()
        return places

    def _enter_module(self, part: nn.Module, name: str) -> None:
        self._hold(part, name, ATTRIBUTES)
        self._hold(part._buffers, name, _BUFFERS)
        self._left += [(hook, f"a hook of {name}") for each in _HOOKS for hook in part.__dict__[each].values()]
        self._enter_function(type(part).forward, name, type(part))
        self._walk()

    @classmethod
    def of_arguments(cls, given: Any) -> _Places:
        places = cls([])
        places._left = [(given, "an argument: ")]
        places._walk()
        return places

    def read(self, parts: list[tuple[str, nn.Module]]) -> list[tuple[_Place, Any]] | None:
        """The places with their contents; None where there may be others by now."""
        if parts != self._parts or _num_hooks(parts) != self._num_hooks:
            return None
        found = [(place, place.kind.read(place.item)) for place in self.found]
        return found if all(place.still_leads_to(content) for place, content in found) else None

    def _hold(self, item: Any, name: str, kind: Kind) -> None:
        content = kind.read(item)
        place = _Place(item, name, kind, content)
        self.found.append(place)
        if not kind.has_values or len(content) > _LONG:
            return
        is_module = isinstance(item, nn.Module)
        kept: list[Any] = []
        for key, value in _items(content):
            if type(value) in _UNCHANGING or (is_module and (key in OF_MODULES or key.startswith("__"))):
                kept.append(value)
            elif isinstance(value, torch.Tensor):
                place.has_tensors = True
                kept.append(_A(torch.Tensor))
            elif type(value) in _ITERATORS:
                place.has_tensors = True
                kept.append(_A(type(value)))
            else:
                place.has_tensors |= type(value) is tuple and _has_tensors(value)
                kept.append(value)
                self._left.append((value, f"{name}{key}."))
        place.content = dict(zip(content, kept)) if isinstance(content, dict) else kept

    def _walk(self) -> None:
        while self._left:
            item, name = self._left.pop()
            kind = type(item)
            if kind in _UNCHANGING or id(item) in self._seen or len(self._seen) > _MANY:
                continue
            self._seen.add(id(item))
            if isinstance(item, nn.Module):
                self._beside.append((item, name))
            if isinstance(item, nn.Module | type | enum.Enum | torch.Tensor):
                continue
            if kind is tuple:
                self._left += [(value, f"{name}{key}.") for key, value in enumerate(item)]
            elif isinstance(item, types.FunctionType):
                self._enter_function(item, name)
            elif isinstance(item, types.MethodType):
                self._left.append((item.__self__, name))
                self._enter_function(item.__func__, name, type(item.__self__))
            elif isinstance(item, functools.partial):
                self._left += [(item.func, name), (item.args, name), (item.keywords, name)]
            else:
                of_container = kind_of(item)
                if of_container is not None:
                    self._hold(item, name, of_container)
                if not _is_of_library(kind.__module__):
                    if has_attributes(item):
                        self._hold(item, name, ATTRIBUTES)
                    for base in kind.__mro__ if not _is_installed(kind.__module__) else ():
                        for value in vars(base).values() if not _is_installed(base.__module__) else ():
                            self._enter_method(value, name, kind)

    def _enter_function(self, function: Any, name: str, owner: type | None = None) -> None:
        """``owner``: the class of which it is a method."""
        if not isinstance(function, types.FunctionType) or _is_of_library(function.__module__):
            return
        if (id(function), owner) in self._entered:
            return
        self._entered.add((id(function), owner))
        values = []
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty one
                values.append(cell.cell_contents)
                if not isinstance(cell.cell_contents, _STATELESS):
                    self._hold(cell, name, CELL)
        names, scope = names_in(function.__code__), function.__globals__
        self._names |= names
        values += self._hold_named(names, scope, named_items)
        if _is_installed(function.__module__):
            return
        self._hold(function, name, ATTRIBUTES)
        for value in list(values):
            if isinstance(value, types.ModuleType) and not _is_installed(value.__name__):
                values += self._hold_named(names, vars(value), named_items)
        for value in values:
            self._enter_function(value, name)
        classes = [value for value in values if isinstance(value, type)]
        for cls in (*classes, *((owner,) if owner is not None else ())):
            for base in cls.__mro__:
                if _is_installed(base.__module__):
                    continue
                for value in self._hold_named(names, base, _named_of_class):
                    self._enter_method(value, name, cls)
                if cls is not owner:
                    self._enter_method(vars(base).get("__init__"), name, cls)
                    self._enter_method(vars(base).get("__call__"), name, cls)

    def _enter_method(self, value: Any, name: str, owner: type) -> None:
        self._enter_function(getattr(value, "__func__", getattr(value, "fget", value)), name, owner)

    def _hold_named(self, names: frozenset[str], holder: Any, kind: Callable[[Sequence[str]], Kind]) -> list[Any]:
        """Of a dictionary or a class. Returns what they name that has no state itself."""
        held = vars(holder) if isinstance(holder, type) else holder
        found = {key: held[key] for key in names if key in held}
        state = tuple(sorted(key for key, value in found.items() if not isinstance(value, (*_STATELESS, *_METHODS))))
        if state and (id(holder), state) not in self._entered:
            self._entered.add((id(holder), state))
            self._hold(holder, f"{holder.__name__}." if isinstance(holder, type) else "", kind(state))
        return [value for key, value in found.items() if key not in state]


@contextlib.contextmanager
def state_unchanged(module: nn.Module) -> Iterator[None]:
    """Inside, the module may run on made-up inputs: what its forward assigns, the random numbers of the host that it draws,
    and what it writes to tensors in its attributes are undone. Buffers and parameters are the caller's to replace."""
    parts = list(module.named_modules())
    buffers = {id(part._buffers) for _, part in parts}
    places = [place for place in _Places.of_module(parts).found if id(place.item) not in buffers]
    places += [_Place(host, "", kind, None) for host in HOST_GENERATORS if (kind := kind_of(host)) is not None]
    held = [(place, place.kind.read(place.item)) for place in places]
    for place, content in held:
        if place.has_tensors:
            place.kind.put(place.item, _mapped(_apart, content))
    try:
        yield
    finally:
        for place, content in held:
            if not is_same(content, place.kind.read(place.item)):
                place.kind.put(place.item, content)


class WatchedForward:
    """What a forward changes in Python: state that is found when it begins, and in functions that :meth:`enter` names."""

    def __init__(self, module: nn.Module) -> None:
        parts = list(module.named_modules())
        self._places, self._parts = _Places.of_module(parts), parts
        self._buffers = {id(part._buffers) for _, part in parts}
        self._held: list[tuple[_Place, Any]] = []
        self._read()

    def _read(self) -> None:
        new = self._places.found[len(self._held) :]
        self._held += [(place, place.kind.read(place.item)) for place in new]

    def enter(self, code: types.CodeType, scope: dict[str, Any]) -> None:
        """A function of the model runs, with these globals."""
        if not _is_of_library(scope.get("__name__")):
            self._places._hold_named(names_in(code), scope, named_items)
            self._places._walk()
            self._read()

    def values(self) -> Iterator[tuple[str, Any, Callable[[], Any]]]:
        """What was held, with names, and functions that tell what is held there by now."""
        for place, content in self._held:
            if place.kind.has_values and id(place.item) not in self._buffers:
                for key, value in _items(content):
                    yield f"{place.name}{key}", value, functools.partial(place.value, key)

    def objects(self) -> list[tuple[Kind, Any]]:
        """Those with state, and the parts of modules, with how their contents are read and put; of long containers, those
        that are others by now."""
        found = [
            (place.kind, place.item)
            for place, before in self._held
            if not _is_long(before) or not is_same(before, place.kind.read(place.item))
        ]
        return found + [(_BUFFERS, part._modules) for _, part in self._parts if part._modules]


def _is_long(content: Any) -> bool:
    return isinstance(content, dict | list | deque | set) and len(content) > _LONG


def _num_hooks(parts: list[tuple[str, nn.Module]]) -> int:
    return sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for _, part in parts)


@dataclass(slots=True)
class _HeldTensor:
    tensor: torch.Tensor
    name: str
    version: tuple[int, ...]
    copy: torch.Tensor | None


class ForwardState:
    """Of the module at ``path``. ``given``: its arguments; tensors among them are not looked at."""

    def __init__(self, module: nn.Module, path: str, given: Any, known: KnownState) -> None:
        self._path, self._known = path, known
        parts = list(module.named_modules())
        self._modes = bytes(part.training for _, part in parts)
        self._is_first = self._modes not in known.written
        self._written = known.written.get(self._modes) or set()
        own = known.places.read(parts) if known.places is not None else None
        if own is None:
            known.places = _Places.of_module(parts)
            own = [(place, place.kind.read(place.item)) for place in known.places.found]
        arguments = [(place, place.kind.read(place.item)) for place in _Places.of_arguments(given).found]
        self._given, self._num_arguments = given, len(arguments)
        self._held = [
            (place, _mapped(_copied, content) if place.has_tensors else content)
            for place, content in (*arguments, *own)
        ]
        # Reading their states takes long.
        for number, host in enumerate(HOST_GENERATORS):
            kind = kind_of(host)
            if kind is not None and (self._is_first or number in self._written):
                self._held.append((_Place(host, "", kind, None), kind.read(host)))
        self._tensors: dict[int, _HeldTensor] = {}
        for place, content in self._held:
            if place.has_tensors:
                self._note_tensors(_items(content), place.name)
        self._frozen: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        # Looked up again: those of a unit are others after a change of requires_grad.
        self._parameters: list[tuple[dict[str, Any], str, str, bool, int]] = []
        for name, part in parts:
            for key, parameter in part._parameters.items():
                if parameter is not None:
                    self._note_parameter(parameter, part._parameters, key, f"{name}.{key}" if name else key)

    def _note_parameter(self, parameter: nn.Parameter, holder: dict[str, Any], key: str, name: str) -> None:
        self._parameters.append((holder, key, name, parameter.requires_grad, _version(parameter)))
        if not parameter.requires_grad:
            self._note_tensors([(name, parameter)], "")
            self._frozen.append((holder, key, parameter))

    def _note_tensors(self, items: Iterable[tuple[Any, Any]], holder: str) -> None:
        for key, value in items:
            if type(value) is tuple:
                self._note_tensors(enumerate(value), f"{holder}{key}.")
            elif isinstance(value, torch.Tensor) and value.grad_fn is None and not value.is_meta:
                name = f"{holder}{key}"
                copies = self._is_first or name in self._written or value.nbytes <= _SMALL
                held = _HeldTensor(value, name, versions(value), _copy(value) if copies else None)
                self._tensors.setdefault(id(value), held)

    def ended(self) -> None:
        """The forward has ended. Raises RecomputationError if it has written where nobody knows what was there."""
        self._written = self._known.written.setdefault(self._modes, self._written)
        copies = dict(self._copies())
        for holder, key, name, requires_grad, version in self._parameters:
            if requires_grad and _version(holder[key]) != version:
                raise self._error(f"writes to the parameter {name!r} in place")
        for holder, key, parameter in self._frozen:
            if id(parameter) in copies:
                kind = named_items((key,))
                self._held.append((_Place(holder, "", kind, None, has_tensors=True), kind.read(holder)))
        stands_for, kept = functools.partial(_stand_in, copies), []
        for place, content in self._held:
            if place.kind.draws:
                if is_same(content, place.kind.read(place.item)):
                    continue
                self._written.update(n for n, host in enumerate(HOST_GENERATORS) if place.item is host)
            kept.append((place, _mapped(stands_for, content) if place.has_tensors else content))
        self._held, self._tensors, self._frozen = kept, {}, []
        self._given = None

    def _copies(self) -> Iterator[tuple[int, _Copy]]:
        """Of tensors that the forward has written to, by their ids."""
        for held in self._tensors.values():
            is_written = versions(held.tensor) != held.version
            if held.copy is None:
                if is_written:
                    raise self._error(f"writes to {held.name!r} in place, which its first forward did not")
            elif (
                is_written or held.name in self._written or (self._is_first and not _are_equal(held.tensor, held.copy))
            ):
                self._written.add(held.name)
                yield id(held.tensor), _Copy(held.copy)

    def _error(self, what: str) -> RecomputationError:
        return RecomputationError(
            f"the checkpointed module {self._path!r} {what}: its recomputation would read the new values, and write a "
            "second time. Write outside of the module, or exclude the module from the plan's checkpoint entries"
        )

    def keeps_tensors_in_arguments(self) -> bool:
        """Whether objects among the arguments hold tensors that they did not hold before."""
        before = [content for place, content in self._held[: self._num_arguments] if place.kind.has_values]
        held = {id(x) for content in before for x in _values(content)}
        places = _Places.of_arguments(self._given).found
        now = (place.kind.read(place.item) for place in places if place.kind.has_values)
        return any(isinstance(x, torch.Tensor) and id(x) not in held for content in now for x in _values(content))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, everything is as it was when the forward began."""
        now = [(place, before, place.kind.read(place.item)) for place, before in self._held]
        changed = [one for one in now if not is_same(*one[1:])]
        given = [(holder.get(key), before) for holder, key, _, before, _ in self._parameters]
        flags = [(p, p.requires_grad) for p, before in given if p is not None and p.requires_grad != before]
        find = functools.partial(_again, {})
        try:
            for place, before, _ in changed:
                place.kind.put(place.item, _mapped(find, before) if place.has_tensors else before)
            for parameter, is_on in flags:
                parameter.requires_grad_(not is_on)
            yield
        finally:
            for parameter, is_on in flags:
                parameter.requires_grad_(is_on)
            for place, _, content in changed:
                place.kind.put(place.item, content)


class _Copy:
    """Stands for a tensor that the forward has written to; each recomputation writes to a copy of its own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Passed(Iterator[Any]):
    """Stands for a generator (a function with ``yield``), which cannot go back to where it was."""

    def __next__(self) -> Any:
        raise RecomputationError(
            "a checkpointed module takes values from a generator (a function with yield), which cannot be taken again "
            "when the module is recomputed: take them outside, and pass them to the module, or exclude the module from "
            "the plan's checkpoint entries"
        )


def _copied(value: Any) -> Any:
    """Of an iterator, what stays where it is."""
    if type(value) is types.GeneratorType:
        return _Passed()
    return copy.copy(value) if type(value) in _ITERATORS else value


def _apart(value: Any) -> Any:
    return _copy(value) if isinstance(value, torch.Tensor) and not value.is_meta else _copied(value)


def _stand_in(copies: Mapping[int, _Copy], value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if id(value) in copies:
        return copies[id(value)]
    return value.detach().requires_grad_() if value.grad_fn is not None else value  # its graph is not held


def _again(copies: dict[_Copy, torch.Tensor], value: Any) -> Any:
    if isinstance(value, _Copy):
        if value not in copies:
            copies[value] = _copy(value.tensor)
        return copies[value]
    return _copied(value)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    with without_modes():  # no op of the model
        if isinstance(tensor, DTensor):
            return make_dtensor(local_of(tensor).detach().clone(), spec_of(tensor))
        return tensor.detach().clone()


def _version(parameter: nn.Parameter) -> int:
    return 0 if parameter.is_inference() else parameter._version


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    found = [own_part(one), own_part(other)]
    return type(found[0]) not in (torch.Tensor, nn.Parameter) or bool(torch.equal(*found))  # else one without values


def _mapped(change: Callable[[Any], Any], content: Any) -> Any:
    """A content with other values, also those of tuples in it."""
    if isinstance(content, dict):
        return {key: _mapped(change, x) if type(x) is tuple else change(x) for key, x in content.items()}
    return type(content)([_mapped(change, x) if type(x) is tuple else change(x) for x in content])


def _items(content: Any) -> Iterable[tuple[Any, Any]]:
    return content.items() if isinstance(content, dict) else enumerate(content)


def _values(content: Any) -> Iterable[Any]:
    return content.values() if isinstance(content, dict) else content


def _has_tensors(value: tuple[Any, ...]) -> bool:
    return any(isinstance(x, torch.Tensor) or (type(x) is tuple and _has_tensors(x)) for x in value)
