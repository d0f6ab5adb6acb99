"""``Guards``: what a recorded step depended on besides tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from vescale.compat import has_hooks

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
        self._num_hooks = num_hooks
        self._modules: list[tuple[str, nn.Module, dict[str, Any], int]] = []
        self._values: list[tuple[str, dict[str, Any], str, Any]] = []
        self._objects: list[tuple[str, dict[str, Any], str, Any]] = []
        for path, module in modules:
            held = module.__dict__
            self._modules.append((path, module, held, len(held)))
            self._values += [(path, held, name, value) for name, value in held.items() if type(value) in _COMPARED]
            for kind in _CONTAINERS:
                self._objects += [(path, held[kind], name, value) for name, value in held[kind].items()]

    def broken(self) -> str:
        """What has changed; "" if nothing has."""
        if has_hooks(None):
            return "there are forward hooks of all modules"
        for path, module, held, size in self._modules:
            if len(held) != size:
                return f"attributes of {path or 'the model'} were added or deleted"
            if has_hooks(module, self._num_hooks):
                return f"{path or 'the model'} has forward hooks"
        for path, held, name, value in self._values:
            found = held.get(name, held)
            if found is not value and (type(found) is not type(value) or found != value):
                return f"{path or 'the model'}.{name} is {found!r} in place of {value!r}"
        for path, held, name, value in self._objects:
            if held.get(name) is not value:
                return f"{path or 'the model'}.{name} was replaced"
        return ""
