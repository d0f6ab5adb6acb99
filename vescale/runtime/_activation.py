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
from vescale.runtime._runtime import Runtime, timelines


@dataclass
class Frame:
    """A running module. The hooks in C++ make objects of their own, with the same attributes.

    Attributes:
        args, kwargs: of its forward.
        compiler: the compiler that was about to compile it; see ``suspend_compiling``.
        results: (path, data pointer) of each DTensor that a submodule returned.
        converted: its conversions of inputs of submodules (:mod:`vescale.runtime._placing`).
        where: the module, as the timeline names it.
        placed: inputs that the plan has brought elsewhere (:mod:`vescale.runtime._placing`); None: there are none.
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


# Attribution: the model and the module whose op a thread is running, in forward and in backward.


@dataclass(frozen=True, slots=True)
class RunningModule:
    """The model and the module that an op belongs to.

    Attributes:
        path: of the module; "" for the model itself.
        phase: ``forward`` or ``backward``.
        frame: of the module, in forward.
    """

    runtime: Runtime
    path: str
    phase: str
    frame: Frame | None


def locate() -> RunningModule | None:
    """The module whose op this thread is running; None outside of every parallelized model."""
    activation = current_activation()
    if activation is not None:
        frame = activation.frames[-1]
        return RunningModule(activation.runtime, frame.path, "forward", frame)
    return locate_node()


def locate_node() -> RunningModule | None:
    """The module whose forward made the autograd node that this thread runs; None outside of backwards, and for others."""
    for timeline in timelines():
        where = timeline.of_current_node()
        runtime = where.runtime if where is not None else None
        if runtime is not None:
            return RunningModule(runtime, where.path, "backward", None)
    return None


def module_of_node(node: Any) -> str | None:
    """The path of the module of any parallelized model whose forward made an autograd node; None: no such module did."""
    found = (timeline.of_node(node) for timeline in timelines())
    return next((where.path for where in found if where is not None and where.runtime is not None), None)


def is_recomputed(paths: Sequence[str], node: Any) -> bool:
    """Whether an autograd node was made inside of the modules at ``paths``."""
    if not paths:
        return False
    path = module_of_node(node)
    return path is not None and any(path == one or path.startswith(f"{one}.") for one in paths)
