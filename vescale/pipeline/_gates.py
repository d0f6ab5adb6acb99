"""Gates: calls of a model's modules that the running stage may answer itself, before any hook of the module."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import nn
from torch.utils.checkpoint import checkpoint

from vescale.compat import note
from vescale.compat.model_hooks import CHECKPOINTED_APART, REFUSES_REENTRANT
from vescale.pipeline._cut import Cut

_THREAD = threading.local()


class StageEnd(Exception):
    """Ends the model's forward where the next stage begins."""


class Run(Protocol):
    """A forward of the model."""

    @property
    def is_outside(self) -> bool:
        """Whether no gated module runs."""

    @property
    def is_trial(self) -> bool:
        """Whether it is no forward of a step: nobody stops in it."""

    def call(self, gate: Gate, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In place of the module's call, hooks and all; ``proceed(*args, **kwargs)`` is that call."""


class Gate:
    """What a gated module knows: its path, its stages (several, of a module with several names), and the stage that begins
    before it (None)."""

    def __init__(self, path: str, stages: frozenset[int], begins: int | None) -> None:
        self.path, self.stages, self.begins = path, stages, begins


def add_gates(model: nn.Module, cut: Cut) -> None:
    """Give the modules of ``cut`` gates. Their classes become subclasses of what they were, with the same name."""
    begins = {name: number + 1 for number, name in enumerate(cut.splits)}
    for path, stages in cut.bound.items():
        module = model.get_submodule(path)
        known: Gate | None = module.__dict__.get("_pipeline_gate")
        if known is not None:  # under another name
            known.begins = known.begins or begins.get(path)
            continue
        module.__dict__["_pipeline_gate"] = Gate(path, stages, begins.get(path))
        note("pipeline._gates:class", module)
        module.__class__ = _gated(type(module))  # type: ignore[arg-type]


@functools.cache
def _gated(cls: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = getattr(_THREAD, "run", None)
        if run is None:
            return cls.__call__(self, *args, **kwargs)
        return run.call(self.__dict__["_pipeline_gate"], functools.partial(cls.__call__, self), args, kwargs)

    call.__wrapped__ = cls.__call__  # type: ignore[attr-defined]
    named = {"__call__": call, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), named)


@contextlib.contextmanager
def running(run: Run | None) -> Iterator[None]:
    """The forward that this thread runs, for gates."""
    before = getattr(_THREAD, "run", None)
    _THREAD.run = run
    try:
        yield
    finally:
        _THREAD.run = before


def _checkpointed_apart(options: Mapping[str, Any]) -> contextlib.AbstractContextManager[None] | None:
    """Where the model checkpoints functions that call gated modules: these calls are checkpointed one by one, for what they
    are given is there then. (What the function is given may stand for what a stage receives.)"""
    run = current_run()
    return None if run is None or not run.is_outside else _recomputing(options)


@contextlib.contextmanager
def _recomputing(options: Mapping[str, Any]) -> Iterator[None]:
    before = getattr(_THREAD, "options", None)
    _THREAD.options = options
    try:
        yield
    finally:
        _THREAD.options = before


def recomputed(proceed: Callable[..., Any]) -> Callable[..., Any]:
    """The call of a gated module, checkpointed if it is a part of what the model checkpoints."""
    options = getattr(_THREAD, "options", None)
    return proceed if options is None else functools.partial(checkpoint, proceed, use_reentrant=False, **options)


CHECKPOINTED_APART.append(_checkpointed_apart)
REFUSES_REENTRANT.append(lambda: current_run() is not None)  # some schedules split backwards


def current_run() -> Run | None:
    return getattr(_THREAD, "run", None)
