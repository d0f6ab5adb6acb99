"""Who is told when an op moves an operand that no plan entry moves, and which module the op belongs to.

The runtime registers one observer in a process; there is one because DTensor has one dispatcher. It looks up the model by
the thread, so that models and threads do not see each other. Without an observer, no op belongs to a model and nothing is
told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement


class ModelObserver(Protocol):
    """What :mod:`vescale.ops` asks and tells about the models that are running."""

    def running_module(self) -> str | None:
        """The path of the module whose op this thread runs, in forward or in backward; "" for the model itself; None
        outside of every parallelized model."""

    def has_model(self, mesh: DeviceMesh) -> bool:
        """Whether a model has been parallelized on ``mesh``."""

    def implicit_move(
        self,
        op: str,
        operand: str | None,
        local: torch.Tensor | None,
        source: Sequence[Placement],
        target: Sequence[Placement],
        edit: str | None,
    ) -> None:
        """Called before ``op`` moves an operand (``local`` is this rank's part) from ``source`` to ``target``.

        ``edit`` is the change to the plan that makes the move explicit, where the op knows a better one than to place the
        operand. May raise, on every rank, which prevents the move.
        """


_OBSERVERS: list[ModelObserver] = []


def observe(observer: ModelObserver) -> None:
    """Register the observer of this process; it replaces an earlier one."""
    _OBSERVERS[:] = [observer]


def running_module() -> str | None:
    """See :meth:`ModelObserver.running_module`."""
    return _OBSERVERS[0].running_module() if _OBSERVERS else None


def has_model(mesh: DeviceMesh) -> bool:
    """See :meth:`ModelObserver.has_model`."""
    return bool(_OBSERVERS) and _OBSERVERS[0].has_model(mesh)


def report_implicit_move(
    op: str,
    operand: str | None,
    local: torch.Tensor | None,
    source: Sequence[Placement],
    target: Sequence[Placement],
    edit: str | None = None,
) -> None:
    """Tell the observer of a move; see :meth:`ModelObserver.implicit_move`. To be called before communicating."""
    for observer in _OBSERVERS:
        observer.implicit_move(op, operand, local, source, target, edit)
