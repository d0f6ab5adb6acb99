"""``HeldValues``: numbers, flags, texts and functions that a forward may read without being given them."""

from __future__ import annotations

import argparse
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.compat import CALL_OVERRIDE, tensors_in
from vescale.static._call_tree import is_recorded
from vescale.static._source import code_objects

__all__ = ["SCALARS", "HeldValues", "is_same_list"]

SCALARS = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_SKIPPED = frozenset(
    (*nn.Module().__dict__, "forward", CALL_OVERRIDE)
)  # what every module has, and what the runtime adds
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_MAX_DEPTH = 4


class HeldValues:
    """Of modules: what lists, dictionaries and objects in their attributes hold, functions in their attributes, and
    attributes of their classes. Of functions: their globals.

    A dictionary that gets another key is not a change: what asks for the key is a branch. Values that change in the
    recorded forward itself are not compared.

    Attributes:
        names: where each of ``dicts`` is held, for reports; ``keys`` and ``values``: of its entries.
        is_function: whether an entry is compared by identity.
        lists: with what they held; ``classes``: with attributes.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self.names: list[str] = []
        self.dicts: list[dict[Any, Any]] = []
        self.keys: list[Any] = []
        self.values: list[Any] = []
        self.is_function: list[bool] = []
        self.lists: list[tuple[str, list[Any], list[Any]]] = []
        self.classes: list[tuple[type, str, Any]] = []
        self._seen: dict[int, Any] = {}  # by id of what has been visited, which the value keeps alive
        self._containers: list[tuple[str, Any, dict[int, torch.Tensor]]] = []  # with the DTensors in them, by id
        self._seen_globals: set[tuple[int, str]] = set()
        for path, module in modules:
            for name, value in module.__dict__.items():
                if name not in _SKIPPED:
                    is_watched = not isinstance(value, list | dict | set)  # else its module is, by ``ModuleStates``
                    where = path or "the model"
                    self._add_entry(where, module.__dict__, name, value, 0, with_scalars=False, is_watched=is_watched)
            for kind in type(module).__mro__:
                self._add_class(kind)

    def add_globals(self, code: types.CodeType, held: dict[str, Any]) -> None:
        """Of a function with the globals ``held``: those that it names."""
        names = {name for part in code_objects(code) for name in part.co_names}
        for name in names & held.keys():
            self._add_global(code, held, name)
            value = held[name]
            if isinstance(value, types.ModuleType) and is_recorded(getattr(value, "__file__", None) or ""):
                for inner in names & value.__dict__.keys():
                    self._add_global(code, value.__dict__, inner)

    def keeps_tensors(self) -> str:
        """The name of a container that has other DTensors in it than before; "" if there is none."""
        return next((name for name, held, before in self._containers if _dtensors_in(held).keys() - before.keys()), "")

    def unchanged(self) -> HeldValues:
        """Those that are now as they were."""
        kept = HeldValues(())
        for row in zip(self.names, self.dicts, self.keys, self.values, self.is_function, strict=True):
            _, held, key, value, is_function = row
            now = dict.get(held, key, held)  # a subclass may have other methods of these names
            if now is value or (not is_function and type(now) is type(value) and now == value):
                kept._append(*row)
        kept.lists = [row for row in self.lists if is_same_list(row[1], row[2])]
        kept.classes = [row for row in self.classes if is_same_list([getattr(row[0], row[1], None)], [row[2]])]
        return kept

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

    def _add_class(self, kind: type) -> None:
        if id(kind) in self._seen:
            return
        self._seen[id(kind)] = kind
        file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
        if not is_recorded(file) or file.startswith(_TORCH):
            return
        for name, value in vars(kind).items():
            if not name.startswith("__"):
                if type(value) in SCALARS:
                    self.classes.append((kind, name, value))
                elif not callable(value):
                    self._add(f"{kind.__name__}.{name}", value, 1)

    def _add_entry(
        self,
        name: str,
        held: dict[Any, Any],
        key: Any,
        value: Any,
        depth: int,
        *,
        with_scalars: bool = True,
        is_watched: bool = True,
    ) -> None:
        if type(value) in SCALARS:
            if with_scalars:
                self._append(name, held, key, value, False)
        elif isinstance(value, nn.Module | torch.Tensor | types.ModuleType):
            return
        elif callable(value):
            self._append(name, held, key, value, True)
        inner = f"{name}.{key}" if isinstance(key, str) else f"{name}[{key!r}]"
        self._add(inner, value, depth + 1, is_watched=is_watched)

    def _add(self, name: str, value: Any, depth: int, *, is_watched: bool = True) -> None:
        if depth > _MAX_DEPTH or type(value) in SCALARS or id(value) in self._seen:
            return
        if is_watched and (isinstance(value, dict | list | set | deque) or _is_described(value)):
            self._containers.append((name, value, _dtensors_in(value)))
        if isinstance(value, dict):
            items = list(dict.items(value))
            held = value
        elif isinstance(value, list | tuple):
            self._seen[id(value)] = value
            if isinstance(value, list) and all(type(item) in SCALARS for item in value):
                self.lists.append((name, value, list(value)))
            else:
                for item in value:
                    self._add(name, item, depth + 1)
            return
        elif _is_described(value):
            held = vars(value)
            items = list(held.items())
        else:
            return
        self._seen[id(value)] = value
        for key, item in items:
            self._add_entry(name, held, key, item, depth)

    def __iter__(self) -> Iterator[tuple[str, dict[Any, Any], Any, Any, bool]]:
        return zip(self.names, self.dicts, self.keys, self.values, self.is_function, strict=True)


def _dtensors_in(value: Any) -> dict[int, torch.Tensor]:
    if isinstance(value, dict):
        value = list(dict.values(value))
    elif isinstance(value, set | deque):
        value = list(value)
    elif not isinstance(value, list):
        value = vars(value)
    return {id(x): x for x in tensors_in(value) if isinstance(x, DTensor)}


def is_same_list(now: list[Any], before: list[Any]) -> bool:
    """``before`` holds scalars; what is there now may be anything."""
    return len(now) == len(before) and all(type(a) is type(b) and a == b for a, b in zip(now, before))


_TORCH = torch.__file__.rpartition("__init__")[0]


def _is_described(value: Any) -> bool:
    """Whether an object is one of the model's: a configuration, a namespace."""
    kind = type(value)
    if isinstance(value, _NAMESPACES):
        return True
    if isinstance(value, nn.Module | torch.Tensor | type | types.ModuleType) or callable(value):
        return False
    package = kind.__module__.partition(".")[0]
    if package in ("torch", "vescale", "builtins") or package in sys.stdlib_module_names:
        return False
    return isinstance(getattr(value, "__dict__", None), dict)
