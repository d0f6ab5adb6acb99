"""What a forward leaves behind in its modules."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from vescale.compat import CALL_OVERRIDE, HOOKS_OF_MODULES, tensors_in
from vescale.fsdp import ModuleState
from vescale.runtime import CheckpointedForward, ExpertRegion, LocalRegion

_OURS = frozenset(("_parameters", "_buffers", "_modules", CALL_OVERRIDE, *HOOKS_OF_MODULES))
_PLAIN = frozenset((bool, int, float, str, type(None)))
_CONTAINERS = (list, dict, set)


class ModuleStates:
    """The attributes of a model's modules before a forward.

    Args:
        managed: parameters that units exchange, as (``id`` of the module, name in it).
    """

    def __init__(self, modules: Mapping[str, nn.Module], managed: Collection[tuple[int, str]]) -> None:
        self._managed = managed
        self._before = [(path, module, _Held(module)) for path, module in modules.items()]

    def changes(self) -> Iterator[tuple[str, str]]:
        """(path, attribute) of each attribute that was written to, with a DTensor in it."""
        holds: dict[int, bool] = {}  # whether there are tensors in an object, which modules may share
        for path, module, held in self._before:
            now = _Held(module)
            if held.is_same(now):
                continue
            before, after = (_state(id(module), each, self._managed, holds) for each in (held, now))
            yield from ((path, name) for name in before.keys() | after.keys() if before.get(name) != after.get(name))


class _Held:
    """What a module holds at some time: attributes, tensors, and the sizes of containers."""

    def __init__(self, module: nn.Module) -> None:
        held = module.__dict__
        self.attributes = held.copy()
        self.tensors = [(kind, dict(held[kind])) for kind in ("_parameters", "_buffers")]
        self.sizes = {name: len(value) for name, value in held.items() if isinstance(value, _CONTAINERS)}

    def is_same(self, other: _Held) -> bool:
        """Whether all are the same objects of the same sizes."""
        return self.sizes == other.sizes and all(
            own.keys() == others.keys() and all(map(operator.is_, own.values(), map(others.__getitem__, own)))
            for own, others in zip(
                (self.attributes, *(found for _, found in self.tensors)),
                (other.attributes, *(found for _, found in other.tensors)),
                strict=True,
            )
        )


def problems_of_modules(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Why modules cannot be static whatever their forward does, by path."""
    problems = {}
    for path, module in modules.items():
        if path and not all(map(_is_ours, _hooks_of(module))):
            problems[path] = "it has hooks, which get DTensors"
        owner = checkpoint_of(module)
        if owner is not None and owner.saves_by_policy:
            problems[path] = "its checkpoint saves results of ops"
    return problems


def regions_of(modules: Mapping[str, nn.Module]) -> frozenset[str]:
    """Paths of the modules that an entry of the plan runs on local tensors, in any mode."""
    return frozenset(path for path, module in modules.items() if path and _is_region(module))


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


def own_forward(module: nn.Module, path: str) -> Callable[..., Any]:
    """The forward inside of what entries of the plan have put around it: what it is when it is called, because classes and
    objects may get others."""
    checkpoint = checkpoint_of(module)
    if checkpoint is not None:
        inner: Callable[..., Any] = checkpoint.inner
        return inner
    if path:
        return lambda *args, **kwargs: module.forward(*args, **kwargs)
    return lambda *args, **kwargs: type(module).forward(module, *args, **kwargs)


def _hooks_of(module: nn.Module) -> Iterator[Any]:
    for name in HOOKS_OF_MODULES:
        yield from module.__dict__[name].values()


def _is_ours(hook: Any) -> bool:
    """Whether it is the runtime's, or a unit's: those of parts of the root's do nothing inside of its forward."""
    owner = getattr(hook, "__self__", hook)
    return isinstance(owner, ModuleState) or type(owner).__module__.startswith("vescale.csrc.")


def _state(module: int, held: _Held, managed: Collection[tuple[int, str]], holds: dict[int, bool]) -> dict[str, Any]:
    """Attributes of a module that hold DTensors, by identity. ``module``: its ``id``."""
    state: dict[str, Any] = {}
    for name, value in held.attributes.items():
        if name in _OURS or type(value) in _PLAIN:
            continue
        if isinstance(value, _CONTAINERS):
            state[name] = tuple(id(x) for x in tensors_in(value) if isinstance(x, DTensor))
            continue
        if id(value) not in holds:
            holds[id(value)] = any(isinstance(x, DTensor) for x in tensors_in(value))
        if holds[id(value)]:
            state[name] = id(value)
    for kind, tensors in held.tensors:
        state.update((f"{kind}.{name}", id(x)) for name, x in tensors.items() if (module, name) not in managed)
    return state
