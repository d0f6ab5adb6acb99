"""What a forward leaves behind in its modules."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from vescale.compat import CALL_OVERRIDE, HOOKS_OF_MODULES, tensors_in
from vescale.fsdp import state_of
from vescale.runtime import CheckpointedForward, ExpertRegion, LocalRegion

__all__ = ["ModuleStates", "checkpoint_of", "is_inside", "own_forward", "problems_of_modules", "regions_of"]

_OURS = frozenset(("_parameters", "_buffers", "_modules", CALL_OVERRIDE, *HOOKS_OF_MODULES))
_PLAIN = frozenset((bool, int, float, str, type(None)))


class ModuleStates:
    """The attributes of a model's modules before a forward.

    Args:
        managed: parameters that units exchange, as (``id`` of the module, name in it).
    """

    def __init__(self, model: nn.Module, managed: Collection[tuple[int, str]]) -> None:
        self._managed = managed
        self._modules = dict(model.named_modules())
        self._held = list(_states(self._modules.values(), managed))

    def changes(self) -> Iterator[tuple[str, str]]:
        """(path, attribute) of each attribute that was written to, with a tensor in it or a number."""
        now = _states(self._modules.values(), self._managed)
        for path, before, after in zip(self._modules, self._held, now, strict=True):
            if before != after:
                yield from (
                    (path, name) for name in before.keys() | after.keys() if before.get(name) != after.get(name)
                )


def problems_of_modules(model: nn.Module) -> dict[str, str]:
    """Why modules cannot be static whatever their forward does, by path."""
    problems = {}
    for path, module in model.named_modules():
        if path and any(len(module.__dict__[name]) > _num_ours(name, module) for name in HOOKS_OF_MODULES):
            problems[path] = "it has hooks, which get DTensors"
        owner = checkpoint_of(module)
        if owner is not None and owner.saves_by_policy:
            problems[path] = "its checkpoint saves results of ops"
    return problems


def regions_of(model: nn.Module) -> frozenset[str]:
    """Paths of the modules that an entry of the plan runs on local tensors, in any mode."""
    return frozenset(path for path, module in model.named_modules() if path and _is_region(module))


def _is_region(module: nn.Module) -> bool:
    checkpoint = checkpoint_of(module)
    forward = module.__dict__.get("forward") if checkpoint is None else checkpoint.inner
    return isinstance(getattr(forward, "__self__", None), ExpertRegion | LocalRegion)


def is_inside(path: str, outer: str) -> bool:
    """Whether a module is ``outer`` or a part of it."""
    return outer == "" or path == outer or path.startswith(outer + ".")


def checkpoint_of(module: nn.Module) -> CheckpointedForward | None:
    """What checkpoints the module by plan; None: nothing does."""
    owner = getattr(module.__dict__.get("forward"), "__self__", None)
    return owner if isinstance(owner, CheckpointedForward) else None


def own_forward(module: nn.Module, path: str) -> Any:
    """The forward inside of what entries of the plan have put around it."""
    checkpoint = checkpoint_of(module)
    forward = checkpoint.inner if checkpoint is not None else module.__dict__.get("forward") if path else None
    return forward if forward is not None else types.MethodType(type(module).forward, module)


def _num_ours(kind: str, module: nn.Module) -> int:
    """The runtime's, and a unit's."""
    if "forward" not in kind:
        return 0
    num_of_unit = 0 if state_of(module) is None else 1 if "pre" in kind else 2
    return 1 + num_of_unit


def _states(modules: Iterable[nn.Module], managed: Collection[tuple[int, str]]) -> Iterator[dict[str, Any]]:
    """Attributes of each module, by identity, and the sizes of those that can grow."""
    holds: dict[int, bool] = {}  # whether there are tensors in an object, which modules may share
    return (_state(module, managed, holds) for module in modules)


def _state(module: nn.Module, managed: Collection[tuple[int, str]], holds: dict[int, bool]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, value in module.__dict__.items():
        if name in _OURS:
            continue
        if type(value) in _PLAIN or isinstance(value, bool | int | float | str):
            state[name] = value
        elif isinstance(value, list | dict | set):
            state[name] = id(value), len(value)
        elif isinstance(value, torch.Tensor):
            state[name] = id(value)
        else:
            if id(value) not in holds:
                holds[id(value)] = any(True for _ in tensors_in(value))
            if holds[id(value)]:
                state[name] = id(value)
    for kind in ("_parameters", "_buffers"):
        for name, value in module.__dict__[kind].items():
            if (id(module), name) not in managed:
                state[f"{kind}.{name}"] = id(value)
    return state
