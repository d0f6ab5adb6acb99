"""The models and modules whose forward a thread is running.

A thread has a stack of activations, one for each parallelized model whose forward it is in. All state of a running forward
is reached through it, so that the models of a process, and its threads, do not see each other.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor.placement_types import Placement

from vescale.plans import AttentionMethod, PlanError
from vescale.runtime._runtime import Runtime

__all__ = ["THREAD", "Activation", "Frame", "activations", "current_activation"]


@dataclass
class Frame:
    """A running module. The hooks in C++ make objects of their own, with the same attributes.

    Attributes:
        args, kwargs: of its forward.
        compiler: the compiler that was about to compile it; see ``suspend_compiling``.
        results: (path, data pointer) of each DTensor that a submodule returned.
        converted: its conversions of inputs of submodules (:mod:`vescale.runtime._shared_conversion`).
        where: the module, as the timeline names it.
        placed: inputs that the plan has brought elsewhere (:mod:`vescale.runtime._write_back`); None: there are none.
    """

    module: nn.Module
    path: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    compiler: Any = None
    results: list[tuple[str, int]] = field(default_factory=list)
    converted: dict[Any, Any] = field(default_factory=dict)
    where: Any = None
    placed: Any = None


class Activation:
    """A forward of a model on this thread, from the call of its outermost module until that returns.

    It is the :class:`vescale.ops.OpContext` of the functions that run inside of it.

    Attributes:
        recorder: gets to know what runs in place of torch functions, and what is placed; None: nobody does.
        static: what runs in place of the model's own forward; None: that does.
        frames: the running modules, outermost first; never empty while the model's code runs.
        contexts: what is switched on during the forward; None: nothing is.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.mesh = runtime.mesh
        self.replicated = runtime.replicated
        self.recorder: Any = None
        self.static: Any = None
        self.frames: list[Frame] = []
        self.contexts: ExitStack | None = None

    @property
    def axis_names(self) -> Sequence[str]:
        return self.runtime.axes.names

    def factory_placements(self) -> tuple[Placement, ...]:
        """The placements of tensors that the running module makes."""
        return self.runtime.factory_placements(self.frames[-1].path)

    def attention_methods(self) -> tuple[AttentionMethod | None, ...]:
        """The attention method of the running module on each axis."""
        return self.runtime.attention_methods(self.frames[-1].path)

    def plan_error(self, problem: str) -> PlanError:
        return PlanError(problem)


class _Thread(threading.local):
    """Attributes: stack: the activations of the thread, innermost last; generating: the models whose ``generate`` runs;
    global_shapes: by ``id`` of a tensor that is given as one rank's part, the shape of the whole, where parts have
    different sizes."""

    def __init__(self) -> None:
        self.stack: list[Activation] = []
        self.generating: list[Runtime] = []
        self.global_shapes: dict[int, tuple[int, ...]] | None = None


THREAD = _Thread()


def activations() -> list[Activation]:
    """The activations of this thread, innermost last."""
    return THREAD.stack


def current_activation() -> Activation | None:
    stack = THREAD.stack
    return stack[-1] if stack else None
