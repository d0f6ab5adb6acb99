"""``Guards``: what a recorded step depended on besides the calls of torch functions that it made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from vescale.compat import GLOBAL_HOOKS, HOOKS_OF_MODULES, native_static
from vescale.fsdp import ManagedParameter

_CONTAINERS = ("_parameters", "_buffers", "_modules")


class Guards:
    """Parameters, buffers, parts and hooks of modules, as of now.

    Args:
        managed: parameters of units, of which modules have one form or the other; by (``id`` of the module, name in it).
        replaced: (``id`` of the module, name in it) of buffers that each forward replaces.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        managed: Mapping[tuple[int, str], ManagedParameter],
        replaced: frozenset[tuple[int, str]] = frozenset(),
    ) -> None:
        self._hooks: list[dict[Any, Any]] = list(GLOBAL_HOOKS)
        self._containers: list[dict[str, Any]] = []
        self._paths: list[str] = []
        self._dicts: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._values: list[Any] = []
        for path, module in modules:
            held = module.__dict__
            self._hooks += [held[name] for name in HOOKS_OF_MODULES]
            if "forward" in held:  # an entry of the plan, around it
                self._add(held, "forward", held["forward"])
            for kind in _CONTAINERS:
                self._containers.append(held[kind])
                self._paths.append(path)
                for name, value in held[kind].items():
                    if (id(module), name) not in managed and (id(module), name) not in replaced:
                        self._add(held[kind], name, value)
        for parameter in dict.fromkeys(managed.values()):
            self._add(parameter.__dict__, "sharded", parameter.sharded)
        self._tensors = [x for x in self._values if isinstance(x, torch.Tensor)]
        self._requires_grad = [x.requires_grad for x in self._tensors]
        self._flags = dict(zip(map(id, self._tensors), self._requires_grad, strict=True))
        self._num_hooks = list(map(len, self._hooks))
        self._sizes = list(map(len, self._containers))
        self._native = native_static()

    def _add(self, held: dict[str, Any], name: str, value: Any) -> None:
        self._dicts.append(held)
        self._names.append(name)
        self._values.append(value)

    def requires_grad(self, x: torch.Tensor) -> bool:
        """Whether a parameter or buffer did, unless it is one that each forward replaces."""
        return self._flags.get(id(x), x.requires_grad)

    def drop_added_hooks(self) -> None:
        """Take away the hooks that a forward has added, which will be repeated."""
        for hooks, number in zip(self._hooks, self._num_hooks, strict=True):
            while len(hooks) > number:
                hooks.popitem()

    def have_replaced(self) -> bool:
        """Whether parameters, buffers or parts of modules are others."""
        return bool(self._native.first_changed(self._dicts, self._names, self._values) >= 0)

    def broken(self) -> str:
        """What has changed; "" if nothing has. It is called before each step, without torch function modes."""
        native = self._native
        if native.first_resized(self._hooks, self._num_hooks) >= 0:
            return "hooks of modules were added or removed"
        changed = native.first_resized(self._containers, self._sizes)
        if changed >= 0:
            return f"attributes or parts of {self._paths[changed] or 'the model'} were added or deleted"
        if native.first_other_flag(self._tensors, self._requires_grad) >= 0:
            return "requires_grad of parameters has changed"
        if self.have_replaced():
            return "parameters, buffers, parts or forwards of modules were replaced"
        return ""
