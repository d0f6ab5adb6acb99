"""Modes in which a parallelized model runs, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.compat import guard_call, shorten_call
from vescale.errors import ParallelizeError
from vescale.ir import Program
from vescale.runtime._runtime import Runtime

__all__ = ["Mode", "mode_named", "register_mode"]


class Mode(Protocol):
    """What ``parallelize(mode=name, record=...)`` does besides installing the plan."""

    def check(self, program: Program, mesh: DeviceMesh | None) -> None:
        """Called before the model is changed. Raises PlanError for a record that does not fit."""

    def install(self, runtime: Runtime, model: nn.Module) -> None:
        """Called at the end."""


class _Eager:
    def __init__(self, record: Any) -> None:
        if record is not None:
            raise ParallelizeError("record= is of static mode; give mode='static' with it")

    def check(self, program: Program, mesh: DeviceMesh | None) -> None: ...

    def install(self, runtime: Runtime, model: nn.Module) -> None:
        """Static mode does without: it replaces the calls of modules itself."""
        for module in model.modules():
            if module._forward_hooks:
                guard_call(module)
            if runtime.native is not None:
                shorten_call(module, runtime.native)


_MODES: dict[str, Callable[[Any], Mode]] = {"eager": _Eager}


def register_mode(name: str, make: Callable[[Any], Mode]) -> None:
    """Make ``parallelize(mode=name, record=record)`` use ``make(record)``."""
    _MODES[name] = make


def mode_named(name: str, record: Any) -> Mode:
    """Raises PlanError for a name that is none, and for a record that the mode cannot read."""
    if name not in _MODES:
        raise ParallelizeError(f"mode={name!r} is none of {', '.join(map(repr, _MODES))}; leave it out for 'eager'")
    return _MODES[name](record)
