"""Attribution: the model and the module whose op a thread is running, in forward and in backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vescale.runtime._activation import Frame, current_activation
from vescale.runtime._runtime import Runtime, timelines

__all__ = ["RunningModule", "is_recomputed", "locate", "locate_node", "module_of_node"]


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
