"""``FunctionTrace``: what the torch functions of a layer were given and returned, in a form that layers have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale.compat import local_of, no_torch_function, spec_of
from vescale.static._held_values import SCALARS

__all__ = ["FunctionTrace", "structure"]

_PLAIN = frozenset(SCALARS) - {slice}  # which may have tensors in it


class FunctionTrace:
    """Layers with equal calls and gradients did the same.

    Tensors are numbered as they first come, so that values went the same ways. The first time they come with placements,
    sizes, strides, and the name in the layer if they are parameters.

    Args:
        layer: the path of the layer.
        name: gives the name of a parameter or buffer of the model; "" for other tensors.

    Attributes:
        calls: functions, with arguments and results.
        gradients: placements of the gradients that arrived at each tensor that the layer has made; after the backward.
    """

    def __init__(self, layer: str, name: Callable[[torch.Tensor], str]) -> None:
        self.layer = layer
        self.calls: list[Any] = []
        self.gradients: list[set[Any]] = []
        self._name = name
        self._numbers: dict[int, int] = {}
        self._held: list[torch.Tensor] = []  # so that no other tensor gets the id

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        with no_torch_function():
            given = structure((args, kwargs), self._number)
            self.calls.append((func, given, structure(result, self._number)))

    def end(self) -> None:
        """After the forward of the layer."""
        self._numbers.clear()
        self._held.clear()

    def _number(self, x: torch.Tensor) -> Any:
        found = self._numbers.get(id(x))
        if found is not None:
            return found
        self._numbers[id(x)] = number = len(self._held)
        self._held.append(x)
        if not isinstance(x, DTensor):
            strides = x.stride() if x.layout is torch.strided else ()
            return number, tuple(x.shape), strides, x.dtype, x.requires_grad
        if x.requires_grad and not x.is_leaf:
            arrived: set[Any] = set()
            self.gradients.append(arrived)
            x.register_hook(functools.partial(_note_arrival, arrived))
        spec, local = spec_of(x), local_of(x)
        shapes = tuple(spec.shape), tuple(local.shape), local.stride()
        return number, self._name(x).removeprefix(self.layer), spec.placements, shapes, x.dtype, x.requires_grad


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


def _note_arrival(arrived: set[Any], grad: torch.Tensor) -> None:
    arrived.add(tuple(grad.placements) if isinstance(grad, DTensor) else None)
