"""``Guards``: what a recorded step depended on besides tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from vescale.compat import GLOBAL_HOOKS, HOOKS_OF_MODULES, native_static
from vescale.fsdp import ManagedParameter
from vescale.static._held_values import HeldValues, is_same_list, is_value, name_of_holder, read_attribute

_CONTAINERS = ("_parameters", "_buffers", "_modules")


class Guards:
    """Attributes of modules that are numbers, flags and texts, their parameters, buffers, parts and hooks, as of now.

    Args:
        managed: parameters of units, of which modules have one form or the other; by (``id`` of the module, name in it).
        values: what else a forward may read.

    Attributes:
        changed: what the recorded forward has changed.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        managed: Mapping[tuple[int, str], ManagedParameter],
        values: HeldValues,
    ) -> None:
        self._hooks: list[dict[Any, Any]] = list(GLOBAL_HOOKS)
        self._containers = _Entries()
        self._attributes = _Entries()
        self._objects = _Entries()
        for path, module in modules:
            held = module.__dict__
            self._hooks += [held[name] for name in HOOKS_OF_MODULES]
            self._containers.add_dict(path, held)
            self._attributes.add(path, held, [name for name, value in held.items() if is_value(value)])
            for kind in _CONTAINERS:
                self._containers.add_dict(path, held[kind])
                self._objects.add(path, held[kind], [name for name in held[kind] if (id(module), name) not in managed])
        for parameter in dict.fromkeys(managed.values()):
            self._objects.add(parameter.name, parameter.__dict__, ["sharded"])
        self._functions = _Entries()
        for name, held, key, value, is_function in values:
            (self._functions if is_function else self._attributes).add_value(name, held, key, value)
        for name, held, size in values.sizes:
            self._containers.add_dict(name, held, size)
        self._lists = values.lists
        self.changed = values.changed
        self._holders, self._names, self._values = ([row[i] for row in values.attributes] for i in range(3))
        self._tensors = [x for x in self._objects.values if isinstance(x, torch.Tensor)]
        self._requires_grad = [x.requires_grad for x in self._tensors]
        self._num_hooks = list(map(len, self._hooks))
        self._native = native_static()

    def have_replaced(self) -> bool:
        """Whether parameters, buffers or parts of modules are others."""
        objects = self._objects
        return bool(self._native.first_changed(objects.dicts, objects.names, objects.values, True) >= 0)

    def broken(self) -> str:
        """What has changed; "" if nothing has. It is called before each step, without torch function modes."""
        native, containers, attributes = self._native, self._containers, self._attributes
        if native.first_resized(self._hooks, self._num_hooks) >= 0:
            return "hooks of modules were added or removed"
        changed = native.first_resized(containers.dicts, containers.values)
        if changed >= 0:
            return f"attributes or parts of {containers.paths[changed] or 'the model'} were added or deleted"
        changed = native.first_changed(attributes.dicts, attributes.names, attributes.values, False)
        if changed >= 0:
            return f"attributes of {attributes.paths[changed] or 'the model'} have changed"
        changed = native.first_changed(self._functions.dicts, self._functions.names, self._functions.values, True)
        if changed >= 0:
            return f"functions or objects in {self._functions.paths[changed]} were replaced"
        for name, held, before in self._lists:
            if not is_same_list(held, before):
                return f"the list {name} has changed"
        changed = native.first_other_attribute(self._holders, self._names, self._values, 0)
        while changed >= 0:  # another object, which may be an equal value
            holder, name = self._holders[changed], self._names[changed]
            if not is_same_list([read_attribute(holder, name)], [self._values[changed]]):
                return f"the attribute {name} of {name_of_holder(holder)} has changed"
            changed = native.first_other_attribute(self._holders, self._names, self._values, changed + 1)
        if native.first_other_flag(self._tensors, self._requires_grad) >= 0:
            return "requires_grad of parameters has changed"
        if self.have_replaced():
            return "parameters, buffers or parts of modules were replaced"
        return ""


class _Entries:
    """Entries of dictionaries, and their values when they were added."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.dicts: list[dict[Any, Any]] = []
        self.names: list[Any] = []
        self.values: list[Any] = []

    def add(self, path: str, held: dict[str, Any], names: Iterable[str]) -> None:
        for name in names:
            self.add_value(path, held, name, held[name])

    def add_value(self, path: str, held: dict[Any, Any], name: Any, value: Any) -> None:
        self.paths.append(path)
        self.dicts.append(held)
        self.names.append(name)
        self.values.append(value)

    def add_dict(self, path: str, held: dict[Any, Any], size: int | None = None) -> None:
        """The dictionary itself, whose value is its number of entries: ``size``, or that of now."""
        self.paths.append(path)
        self.dicts.append(held)
        self.values.append(len(held) if size is None else size)
