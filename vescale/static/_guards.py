"""``Guards``: what a recorded step depended on besides tensors."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from vescale.compat import GLOBAL_HOOKS, HOOKS_OF_MODULES

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
    """Attributes of modules that are numbers, flags and texts, their parameters, buffers, parts and hooks, as they are now.

    Args:
        modules: (path, module).
        num_hooks: forward hooks that a module has of ours, before and after each.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], num_hooks: int = 1) -> None:
        self._held: list[dict[str, Any]] = []
        self._paths: list[str] = []
        self._hooks: list[dict[Any, Any]] = list(GLOBAL_HOOKS)
        self._tensors: list[tuple[str, torch.Tensor, bool]] = []
        self._values: list[tuple[str, dict[str, Any], Any, tuple[Any, ...]]] = []
        self._objects: list[tuple[str, dict[str, Any], Any, tuple[Any, ...]]] = []
        for path, module in modules:
            held = module.__dict__
            self._held.append(held)
            self._paths.append(path)
            self._hooks += [held[name] for name in HOOKS_OF_MODULES]
            names = [name for name, value in held.items() if type(value) in _COMPARED]
            self._values.append((path, held, *_getter(held, names)))
            for kind in _CONTAINERS:
                if held[kind]:
                    self._objects.append((path, held[kind], *_getter(held[kind], list(held[kind]))))
                    self._tensors += [
                        (f"{path}.{name}", x, x.requires_grad)
                        for name, x in held[kind].items()
                        if isinstance(x, torch.Tensor)
                    ]
        self._num_attributes = list(map(len, self._held))
        self._num_hooks = list(map(len, self._hooks))

    def broken(self) -> str:
        """What has changed; "" if nothing has."""
        if list(map(len, self._hooks)) != self._num_hooks:
            return "forward hooks of modules were added or removed"
        if list(map(len, self._held)) != self._num_attributes:
            changed = next(i for i, n in enumerate(map(len, self._held)) if n != self._num_attributes[i])
            return f"attributes of {self._paths[changed] or 'the model'} were added or deleted"
        for path, held, get, values in self._values:
            try:
                if get(held) != values:
                    return f"attributes of {path or 'the model'} have changed"
            except KeyError as missing:
                return f"{path or 'the model'}.{missing.args[0]} was deleted"
        for name, x, requires_grad in self._tensors:
            if x.requires_grad is not requires_grad:
                return f"requires_grad of {name} is {x.requires_grad} now"
        for path, held, get, objects in self._objects:
            try:
                if not all(map(operator.is_, get(held), objects)):
                    return f"parameters, buffers or parts of {path or 'the model'} were replaced"
            except KeyError as missing:
                return f"{path or 'the model'}.{missing.args[0]} was deleted"
        return ""


def _getter(held: dict[str, Any], names: list[str]) -> tuple[Any, tuple[Any, ...]]:
    """A function of a dictionary to a tuple of its values, and its result for ``held``."""
    get = operator.itemgetter(*names, names[0])  # two at least, so that it is a tuple
    return get, get(held)
