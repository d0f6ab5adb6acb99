"""Modes in which a parallelized model runs, by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from vescale.errors import ParallelizeError
from vescale.runtime._runtime import Runtime

__all__ = ["install_mode", "register_mode"]

_MODES: dict[str, Callable[[Runtime, nn.Module], None]] = {"eager": lambda runtime, model: None}


def register_mode(name: str, install: Callable[[Runtime, nn.Module], None]) -> None:
    """Make ``parallelize(mode=name)`` call ``install(runtime, model)`` at its end."""
    _MODES[name] = install


def install_mode(name: str) -> Callable[[Runtime, nn.Module], None]:
    """What makes a model run in a mode. Raises PlanError for a name that is none."""
    if name not in _MODES:
        raise ParallelizeError(f"mode={name!r} is none of {', '.join(map(repr, _MODES))}; leave it out for 'eager'")
    return _MODES[name]
