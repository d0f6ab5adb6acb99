"""``LayerTrace``: what a layer did in a recorded step, in a form that layers have in common."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vescale.compat import native_static
from vescale.static._call_tree import is_recorded
from vescale.static._held_values import SCALARS

__all__ = ["LayerTrace", "structure"]

_PLAIN = SCALARS - {slice}  # which may have tensors in it


class LayerTrace:
    """Calls of torch functions and modules: from which instructions, what they were given and returned, and which placements
    gradients had (``csrc/layer_trace.h``).

    Args:
        frame: of the function that calls the layer.
        path: of the layer.
        placements: a dictionary that traces share, in which they find equal placements.
        like: the trace that this one is compared with as it grows; None: this one is kept.
    """

    def __init__(
        self, frame: types.FrameType, path: str, placements: dict[Any, Any], like: LayerTrace | None = None
    ) -> None:
        self.path = path
        self._objects: list[Any] = [] if like is None else like._objects
        self._native: Any = native_static().LayerTrace(
            frame, f"{path}.", placements, None if like is None else like._native
        )

    def note(self, called: Any, given: Any, returned: Any, names: dict[int, str]) -> None:
        """After a call. ``names``: of parameters and buffers, by ``id``."""
        self._native.note(self._objects, called, given, returned, names, is_recorded)

    def end(self) -> None:
        """After the forward of the layer."""
        self._native.end(self._objects)

    @property
    def differs(self) -> bool:
        """After the backward: whether anything was other than in the trace that this one is compared with."""
        return self._native.differs()


def structure(value: Any, of_tensor: Callable[[torch.Tensor], Any]) -> Any:
    """Containers, slices, numbers, flags and texts by what they are, objects by identity; tensors as ``of_tensor`` says."""
    if type(value) in _PLAIN:
        return type(value), value
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    if isinstance(value, list | tuple):
        return type(value), tuple(structure(item, of_tensor) for item in value)
    if isinstance(value, dict):
        return type(value), tuple((key, structure(item, of_tensor)) for key, item in value.items())
    if isinstance(value, slice):
        return slice, structure((value.start, value.stop, value.step), of_tensor)
    return _Same(value)


@dataclass(frozen=True, eq=False)
class _Same:
    """An object, equal to itself only."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value
