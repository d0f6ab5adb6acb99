"""Attribution: the model and the module whose op a thread is running, in forward and in backward."""

from __future__ import annotations

from dataclasses import dataclass

from vescale.compat import current_autograd_node, node_sequence
from vescale.runtime._activation import Frame, current_activation
from vescale.runtime._runtime import Runtime, runtimes

__all__ = ["RunningModule", "locate", "path_of_sequence"]


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
    node = current_autograd_node()
    if node is not None:
        number = node_sequence(node)
        for runtime in runtimes():
            path = runtime.timeline.path_of(number)
            if path is not None:
                return RunningModule(runtime, path, "backward", None)
    return None


def path_of_sequence(number: int) -> str | None:
    """The module of any parallelized model whose forward made the autograd node with sequence number ``number``."""
    return next((path for runtime in runtimes() if (path := runtime.timeline.path_of(number)) is not None), None)
