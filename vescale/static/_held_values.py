"""``HeldValues``: numbers, flags, texts and functions that a forward may read without being given them."""

from __future__ import annotations

import argparse
import dis
import enum
import functools
import gc
import numbers
import operator
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.compat import CALL_OVERRIDE, local_of, no_torch_function, tensors_in, versions
from vescale.static._call_tree import is_recorded
from vescale.static._exchanged_code import code_of
from vescale.static._source import code_objects

# ``KeptTensors``: where a forward may leave tensors for later steps, other than in modules.

_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_CACHE = type(functools.lru_cache(lambda: None))


class KeptTensors:
    """Containers, objects, caches of functions, attributes of classes and functions, cells of closures and globals that
    functions set, and the DTensors in them when they were added."""

    def __init__(self) -> None:
        self._holders: list[tuple[str, Any, dict[int, DTensor]]] = []

    def add(self, name: str, holder: Any) -> None:
        self._holders.append((name, holder, _dtensors_in(holder)))

    def add_globals(self, code: types.CodeType, held: dict[str, Any]) -> None:
        """Those that the function with this code sets."""
        for name in names_of_globals_set(code):
            self.add(f"the global {name}", functools.partial(held.get, name))

    def changed(self) -> str:
        """The name of a holder that has other DTensors than before; "" if there is none."""
        return next((name for name, held, before in self._holders if _dtensors_in(held).keys() - before.keys()), "")


@functools.lru_cache(maxsize=4096)
def names_of_globals_set(code: types.CodeType) -> frozenset[str]:
    """Names of globals that a function, or one that is defined in it, sets."""
    own = (
        (one.argval for one in dis.get_instructions(code) if one.opcode == _STORE_GLOBAL)
        if _STORE_GLOBAL in code.co_code[::2]
        else ()
    )
    inner = (names_of_globals_set(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(own).union(*inner)


def _dtensors_in(holder: Any) -> dict[int, DTensor]:
    match holder:
        case list():
            items = holder
        case dict():
            items = list(dict.values(holder))
        case set() | deque():
            items = list(holder)
        case types.CellType():
            items = [_contents(holder)]
        case functools.partial():  # of a global
            items = [holder()]
        case _ if isinstance(holder, _CACHE):
            items = [x for x in gc.get_referents(holder) if isinstance(x, DTensor | list | tuple)]
        case type():
            items = [x for x in vars(holder).values() if isinstance(x, DTensor | list | tuple | dict)]
        case _:
            items = [vars(holder)]
    return {id(x): x for x in tensors_in(items) if isinstance(x, DTensor)}


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


# ``PythonState``: what a forward changes besides tensors of its modules, and holds again before the forward is
# repeated.

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


SCALARS = frozenset((bool, int, float, complex, str, bytes, range, slice, type(None), torch.dtype, torch.device))
_SKIPPED = frozenset(
    (*nn.Module().__dict__, "forward", CALL_OVERRIDE)
)  # what every module has, and what the runtime adds
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_MAX_DEPTH = 12


class HeldValues:
    """Of modules: what lists, dictionaries and objects in their attributes hold, functions in their attributes, and
    attributes of their classes. Of functions: their globals, and of those that are found: defaults and closures.

    Values that change in the recorded forward itself are not compared.

    Attributes:
        names: where each of ``dicts`` is held, for reports; ``keys`` and ``values``: of its entries.
        is_function: whether an entry is compared by identity.
        lists: with what they, and sets, held; ``sizes``: dictionaries and the number of their entries.
        attributes: (object, name, value), of classes, functions, cells of closures, and objects without a dictionary.
        changed: what has changed since; changed_names: of globals and attributes among it; advanced: the name of an iterator
            that functions read, if there is one.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self.names: list[str] = []
        self.dicts: list[dict[Any, Any]] = []
        self.keys: list[Any] = []
        self.values: list[Any] = []
        self.is_function: list[bool] = []
        self.lists: list[tuple[str, Collection[Any], list[Any]]] = []
        self.sizes: list[tuple[str, dict[Any, Any], int]] = []
        self.attributes: list[tuple[Any, str, Any]] = []
        self.changed, self.changed_names, self.advanced = PythonState(), set[str](), ""
        self._of_functions: dict[types.CodeType, list[tuple[Any, str, Any]]] = {}  # compared if the function has run
        self._of_modules: list[tuple[str, dict[Any, Any], Any, Any]] = []  # objects, compared if the attribute was read
        self._seen: dict[int, Any] = {}  # by id of what has been visited, which the value keeps alive
        self.kept_tensors, self._objects = KeptTensors(), StateObjects()
        self._set_globals: list[tuple[dict[str, Any], str, Any]] = []
        self._seen_globals: set[tuple[int, str]] = set()
        for path, module in modules:
            for name, value in module.__dict__.items():
                if name not in _SKIPPED:
                    is_watched = not isinstance(value, list | dict | set)  # else its module is, by ``ModuleStates``
                    where = path or "the model"
                    self._add_entry(where, module.__dict__, name, value, 0, of_module=True, is_watched=is_watched)
            self._add_forward(path, module)
            for kind in type(module).__mro__:
                self._add_class(kind)

    def add_globals(self, code: types.CodeType, held: dict[str, Any]) -> None:
        """Of a function with the globals ``held``: those that it names."""
        self.kept_tensors.add_globals(code, held)
        self._set_globals += [(held, name, held.get(name, MISSING)) for name in names_of_globals_set(code)]
        names = {name for part in code_objects(code) for name in part.co_names}
        for name in names & held.keys():
            self._add_global(code, held, name)
            self._add_module(code, names, held[name])

    def _add_module(self, code: types.CodeType, names: set[str], value: Any) -> None:
        """What a function with these names may read of a Python module. Of others than the model's, only what is replaced
        counts: ``F.relu = ...``."""
        if not isinstance(value, types.ModuleType):
            return
        is_of_model = is_recorded(getattr(value, "__file__", None) or "")
        held = value.__dict__
        for name in names & held.keys():
            if (id(held), name) in self._seen_globals:
                continue
            if is_of_model:
                self._add_global(code, held, name)
            else:
                self._seen_globals.add((id(held), name))
                self._append(f"the module {value.__name__}", held, name, held[name], not is_value(held[name]))
            self._add_module(code, names, held[name])

    def unchanged(self, functions: Collection[types.CodeType]) -> HeldValues:
        """Those that are now as they were. ``functions``: all that ran."""
        for code in functions:
            for found in self._of_functions.get(code, ()):
                self.attributes.append(found)
                self._add(f"the function {code.co_name}", found[2], 1)
        read = {name for code in functions for part in code_objects(code) for name in part.co_names}
        read |= {
            text for code in functions for part in code_objects(code) for text in part.co_consts if type(text) is str
        }
        kept = HeldValues(())
        kept.advanced = next((f"{name} of {where}" for where, name in self._objects.iterators if name in read), "")
        for value in self._objects.changed():
            kept.changed.add(value)
        for held, name, value in self._set_globals:
            if not is_same_list([held.get(name, MISSING)], [value]):
                kept._note_change(held, name)
        for row in zip(self.names, self.dicts, self.keys, self.values, self.is_function, strict=True):
            if _is_unchanged(*row[1:]):
                kept._append(*row)
            else:
                kept._note_change(row[1], row[2])
        for name, held, key, value in self._of_modules:
            if not _is_unchanged(held, key, value, True):
                kept._note_change(held, key)
            elif key in read:
                kept._append(name, held, key, value, True)
        for one in self.lists:
            if is_same_list(one[1], one[2]):
                kept.lists.append(one)
            else:
                kept.changed.add(one[1])
        for name, held, size in self.sizes:
            if len(held) == size:
                kept.sizes.append((name, held, size))
            else:
                kept.changed.add(held)
        for holder, name, value in self.attributes:
            if is_same_list([read_attribute(holder, name)], [value]):
                kept.attributes.append((holder, name, value))
            else:
                kept._note_change(holder, name)
        return kept

    def _note_change(self, holder: Any, name: Any) -> None:
        self.changed_names.add(str(name))
        self.changed.add(holder, name)

    def _append(self, name: str, held: dict[Any, Any], key: Any, value: Any, is_function: bool) -> None:
        self.names.append(name)
        self.dicts.append(held)
        self.keys.append(key)
        self.values.append(value)
        self.is_function.append(is_function)

    def _add_global(self, code: types.CodeType, held: dict[str, Any], name: str) -> None:
        if (id(held), name) not in self._seen_globals:
            self._seen_globals.add((id(held), name))
            self._add_entry(f"the globals of {code.co_name}", held, name, held[name], 0)

    def _add_forward(self, path: str, module: nn.Module) -> None:
        """What the module runs: of itself, which the runtime may have set, or of its class."""
        if path and "forward" in module.__dict__:
            self._append(path, module.__dict__, "forward", module.__dict__["forward"], False)
        kind = type(module)
        if (id(kind), "forward") not in self._seen_globals:
            self._seen_globals.add((id(kind), "forward"))
            self.attributes.append((kind, "forward", kind.forward))

    def _add_class(self, kind: type) -> None:
        if id(kind) in self._seen:
            return
        self._seen[id(kind)] = kind
        file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
        if not is_recorded(file) or file.startswith(_TORCH):
            return
        self.kept_tensors.add(f"attributes of {kind.__name__}", kind)
        for name, value in list(vars(kind).items()):
            if isinstance(value, _CACHES):
                self._add(f"{kind.__name__}.{name}", value, 1)
            elif type(value) is types.FunctionType:
                self._of_functions.setdefault(value.__code__, []).append((kind, name, value))
                self._add_function(value)
            elif not name.startswith("__"):
                if is_value(value):
                    self.attributes.append((kind, name, value))
                elif not callable(value):
                    self._add(f"{kind.__name__}.{name}", value, 1)

    def _add_function(self, function: types.FunctionType) -> None:
        """Its default arguments, and what it finds in its closure."""
        if id(function) in self._seen:
            return
        self._seen[id(function)] = function
        rows = self._of_functions.setdefault(code_of(function) or function.__code__, [])
        rows += [(function, name, getattr(function, name)) for name in ("__defaults__", "__kwdefaults__")]
        self.kept_tensors.add(f"attributes of {function.__name__}", function)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            held = read_attribute(cell, "cell_contents")
            self.kept_tensors.add(f"the closure of {function.__name__}", cell)
            self._objects.add(f"the closure of {function.__name__}", name, held)
            if type(held) is types.FunctionType:
                self._add_function(held)
            if not isinstance(held, torch.Tensor):
                rows.append((cell, "cell_contents", held))

    def _add_entry(
        self,
        name: str,
        held: dict[Any, Any],
        key: Any,
        value: Any,
        depth: int,
        *,
        of_module: bool = False,
        is_watched: bool = True,
    ) -> None:
        """``of_module``: guards compare the numbers, flags and texts in its attributes."""
        if is_value(value):
            if not of_module:
                self._append(name, held, key, value, False)
            return
        self._objects.add(name, key, value)
        if isinstance(value, nn.Module | torch.Tensor | types.ModuleType):
            return
        if callable(value) or not of_module:
            self._append(name, held, key, value, True)
        else:
            self._of_modules.append((name, held, key, value))
        inner = f"{name}.{key}" if isinstance(key, str) else f"{name}[{key!r}]"
        self._add(inner, value, depth + 1, is_watched=is_watched)

    def _add(self, name: str, value: Any, depth: int, *, is_watched: bool = True) -> None:
        if type(value) is types.FunctionType:
            self._add_function(value)
        if isinstance(value, functools.partial):
            value = [value.func, value.args, value.keywords]
        if depth > _MAX_DEPTH or is_value(value) or id(value) in self._seen:
            return
        if is_watched and (isinstance(value, _WATCHED) or _is_described(value)):
            self.kept_tensors.add(name, value)
        if isinstance(value, dict):
            items = list(dict.items(value))
            held = value
        elif isinstance(value, list | tuple | set | deque):
            self._seen[id(value)] = value
            if not isinstance(value, tuple):
                self.lists.append((name, value, list(value)))
            for item in value:
                self._objects.add(name, "an item", item)
                self._add(name, item, depth + 1)
            return
        elif _is_described(value):
            held = vars(value)
            items = list(held.items())
        else:
            slots = (n for kind in type(value).__mro__ for n in _names_of_slots(kind)) if _is_of_model(value) else ()
            self.attributes += [(value, n, v) for n in slots if (v := read_attribute(value, n)) is not MISSING]
            return
        self._seen[id(value)] = value
        self.sizes.append((name, held, len(held)))
        for key, item in items:
            self._add_entry(name, held, key, item, depth)

    def __iter__(self) -> Iterator[tuple[str, dict[Any, Any], Any, Any, bool]]:
        return zip(self.names, self.dicts, self.keys, self.values, self.is_function, strict=True)


def _is_unchanged(held: dict[Any, Any], key: Any, value: Any, is_function: bool) -> bool:
    now = dict.get(held, key, held)  # a subclass may have other methods of these names
    return now is value or (not is_function and type(now) is type(value) and bool(now == value))


def is_value(value: Any) -> bool:
    """Whether something is compared by what it is: numbers, flags, texts, and tuples of them."""
    kind: Any = type(value)
    if kind in SCALARS or _is_number(kind):
        return True
    return issubclass(kind, tuple | frozenset) and all(map(is_value, value))


@functools.lru_cache(maxsize=1024)
def _is_number(kind: Any) -> bool:
    """Of the values of a type."""
    return issubclass(kind, enum.Enum | numbers.Number)


def is_same_list(now: Collection[Any], before: list[Any]) -> bool:
    """Whether a list has the items that it had, or others that are equal values."""
    return len(now) == len(before) and (
        all(map(operator.is_, now, before))
        or all(a is b or (type(a) is type(b) and is_value(a) and a == b) for a, b in zip(now, before))
    )


def name_of_holder(holder: Any) -> str:
    """Of what :func:`read_attribute` reads."""
    kind = "class" if isinstance(holder, type) else "function" if isinstance(holder, types.FunctionType) else "object"
    return f"the {kind} {getattr(holder, '__qualname__', type(holder).__name__)}"


def read_attribute(holder: Any, name: str) -> Any:
    """Of a class, a function, a cell or an object with slots; a mark where there is none."""
    try:
        return getattr(holder, name, MISSING)
    except ValueError:  # an empty cell
        return MISSING


_CACHES = type(functools.lru_cache(lambda: None))
_WATCHED = (dict, list, set, deque, _CACHES)
_TORCH = torch.__file__.rpartition("__init__")[0]


def _is_described(value: Any) -> bool:
    """Whether an object is one of the model's: a configuration, a namespace."""
    if isinstance(value, _NAMESPACES):
        return True
    return _is_of_model(value) and isinstance(getattr(value, "__dict__", None), dict)


def _is_of_model(value: Any) -> bool:
    """Whether the class of an object is none of PyTorch's or Python's."""
    if isinstance(value, nn.Module | torch.Tensor | type | types.ModuleType | types.FunctionType):
        return False
    package = type(value).__module__.partition(".")[0]
    return package not in ("torch", "vescale", "builtins") and package not in sys.stdlib_module_names


def _names_of_slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
