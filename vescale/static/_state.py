"""What a forward leaves behind in its modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from vescale.compat import CALL_OVERRIDE, HOOKS_OF_MODULES, tensors_in

__all__ = ["ModuleStates", "problems_of_modules"]

_OURS = ("_parameters", "_buffers", "_modules", CALL_OVERRIDE, *HOOKS_OF_MODULES)


class ModuleStates:
    """The attributes of a model's modules before a forward."""

    def __init__(self, model: nn.Module) -> None:
        self._held = {path: _state(module) for path, module in model.named_modules()}
        self._modules = dict(model.named_modules())

    def changes(self) -> Iterator[tuple[str, str]]:
        """(path, attribute) of each attribute that was written to, with a tensor in it or a number."""
        for path, module in self._modules.items():
            before, after = self._held[path], _state(module)
            for name in before.keys() | after.keys():
                if before.get(name) != after.get(name):
                    yield path, name


def problems_of_modules(model: nn.Module) -> dict[str, str]:
    """Why modules cannot be static whatever their forward does, by path."""
    problems = {}
    for path, module in model.named_modules():
        if path and any(len(module.__dict__[name]) > _num_ours(name) for name in HOOKS_OF_MODULES):
            problems[path] = "it has hooks, which get DTensors"
    return problems


def _num_ours(kind: str) -> int:
    return 1 if "forward" in kind else 0


def _state(module: nn.Module) -> dict[str, Any]:
    """Attributes by identity, and the sizes of those that can grow."""
    state: dict[str, Any] = {}
    for name, value in module.__dict__.items():
        if name in _OURS:
            continue
        if isinstance(value, bool | int | float | str | type(None)):
            state[name] = value
        elif isinstance(value, list | dict | set):
            state[name] = id(value), len(value)
        elif isinstance(value, torch.Tensor) or any(True for _ in tensors_in(value)):
            state[name] = id(value)
    for kind in ("_parameters", "_buffers"):
        for name, value in module.__dict__[kind].items():
            state[f"{kind}.{name}"] = id(value)
    return state
