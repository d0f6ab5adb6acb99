"""``Guards``: what a recorded step depended on besides tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from vescale.compat import GLOBAL_HOOKS, HOOKS_OF_MODULES
from vescale.fsdp import ManagedParameter

__all__ = ["Guards", "settings"]

_CONTAINERS = ("_parameters", "_buffers", "_modules")
_COMPARED = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


def settings() -> tuple[Any, ...]:
    """Settings of the process and thread that decide what a forward does."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_cache_enabled(),
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
    )


class Guards:
    """Attributes of modules that are numbers, flags and texts, their parameters, buffers, parts and hooks, as of now.

    Args:
        managed: parameters of units, of which modules have one form or the other; by (``id`` of the module, name in it).
    """

    def __init__(
        self, modules: Iterable[tuple[str, nn.Module]], managed: Mapping[tuple[int, str], ManagedParameter]
    ) -> None:
        self._hooks: list[dict[Any, Any]] = list(GLOBAL_HOOKS)
        self._sized: list[tuple[str, dict[str, Any]]] = []
        self._attributes = _Entries()
        self._objects = _Entries()
        for path, module in modules:
            held = module.__dict__
            self._hooks += [held[name] for name in HOOKS_OF_MODULES]
            self._sized.append((path, held))
            self._attributes.add(path, held, [name for name, value in held.items() if type(value) in _COMPARED])
            for kind in _CONTAINERS:
                self._sized.append((path, held[kind]))
                self._objects.add(path, held[kind], [name for name in held[kind] if (id(module), name) not in managed])
        self._at_rest = _Entries()
        for parameter in dict.fromkeys(managed.values()):
            self._at_rest.add(parameter.name, parameter.__dict__, ["sharded"])
        kept = chain(self._objects.flat, self._at_rest.flat)
        self._tensors = [x for x in kept if isinstance(x, torch.Tensor)]
        self._requires_grad = [x.requires_grad for x in self._tensors]
        self._num_entries = [len(held) for _, held in self._sized]
        self._num_hooks = list(map(len, self._hooks))

    def broken(self) -> str:
        """What has changed; "" if nothing has. It is called before each step."""
        if list(map(len, self._hooks)) != self._num_hooks:
            return "hooks of modules were added or removed"
        sizes = [len(held) for _, held in self._sized]
        if sizes != self._num_entries:
            path = next(path for (path, _), new, old in zip(self._sized, sizes, self._num_entries) if new != old)
            return f"attributes or parts of {path or 'the model'} were added or deleted"
        if (found := self._attributes.read()) != self._attributes.values:
            return f"attributes of {self._attributes.differing(found) or 'the model'} have changed"
        if [x.requires_grad for x in self._tensors] != self._requires_grad:
            return "requires_grad of parameters has changed"
        if not (self._objects.is_unchanged() and self._at_rest.is_unchanged()):
            return "parameters, buffers or parts of modules were replaced"
        return ""


class _Entries:
    """Entries of dictionaries, and their values when they were added."""

    def __init__(self) -> None:
        self._paths: list[str] = []
        self._getters: list[tuple[Callable[[dict[str, Any]], tuple[Any, ...]], dict[str, Any]]] = []
        self.values: list[tuple[Any, ...]] = []
        self.flat: list[Any] = []

    def add(self, path: str, held: dict[str, Any], names: list[str]) -> None:
        if names:
            get = operator.itemgetter(*names, names[0])  # two at least, so that it returns a tuple
            self._paths.append(path)
            self._getters.append((get, held))
            self.values.append(get(held))
            self.flat += get(held)

    def read(self) -> list[tuple[Any, ...]] | None:
        """The values now; None if an entry is missing."""
        try:
            return [get(held) for get, held in self._getters]
        except KeyError:
            return None

    def is_unchanged(self) -> bool:
        """Whether the values are still the same objects."""
        found = self.read()
        return found is not None and all(map(operator.is_, chain.from_iterable(found), self.flat))

    def differing(self, found: list[tuple[Any, ...]] | None) -> str:
        """The path of the first dictionary whose values differ."""
        pairs = zip(self._paths, self.values, found or [], strict=False)
        return next((path for path, old, new in pairs if old != new), "a module")
