"""Which model's forward a thread is running, and in which of its modules.

A thread has a stack of activations, one for each parallelized model whose forward it is in; nothing else in this package
is reachable without going through it, so that models in one process do not see each other.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from vescale.runtime._runtime import Runtime

__all__ = ["Activation", "Frame", "activations", "current"]


@dataclass
class Frame:
    """One running module: its name, its arguments, where its submodules' results lie (path, data pointer), what their
    inputs were converted to (:mod:`vescale.runtime._sharing`), and the compiler that was about to compile it."""

    module: nn.Module
    path: str
    arguments: tuple[Any, ...]
    results: list[tuple[str, int]] = field(default_factory=list)
    converted: dict[Any, Any] = field(default_factory=dict)
    compiler: Any = None


@dataclass
class Activation:
    """A model's forward on this thread: entered with its outermost module, left with it."""

    runtime: Runtime
    contexts: ExitStack
    frames: list[Frame] = field(default_factory=list)


_THREAD = threading.local()


def activations() -> list[Activation]:
    """This thread's activations, innermost last."""
    if not hasattr(_THREAD, "stack"):
        _THREAD.stack = []
    return _THREAD.stack


def current() -> Activation | None:
    stack = activations()
    return stack[-1] if stack else None
