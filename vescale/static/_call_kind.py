"""What distinguishes calls of a model that are recorded separately."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale.compat import spec_of, tensors_in

__all__ = ["quick_shape", "shape_of"]


def quick_shape(value: Any, specs: list[Any]) -> Any:
    """What decides about :func:`shape_of`; DTensors by the addresses of their specs, which are added to ``specs``."""
    kind = type(value)
    if kind is DTensor:
        spec = spec_of(value)
        specs.append(spec)
        return id(spec), value.requires_grad
    if kind is tuple or kind is list:
        return kind, *[quick_shape(item, specs) for item in value]
    return shape_of(value)


def shape_of(value: Any) -> Any:
    """Structure of an argument, without sizes other than 0 and 1."""
    if isinstance(value, DTensor):
        small = tuple(size if size < 2 else -1 for size in value.shape)
        return "DTensor", tuple(value.placements), value.dtype, value.device.type, value.requires_grad, small
    if isinstance(value, torch.Tensor):
        return "Tensor", value.dtype, value.device.type, value.requires_grad, value.ndim
    if isinstance(value, list | tuple):
        return type(value), tuple(map(shape_of, value))
    if isinstance(value, dict):
        return type(value), tuple((key, shape_of(item)) for key, item in value.items())
    if isinstance(value, bool | int | float | str | bytes | type(None)):
        return type(value), value
    return type(value), tuple(map(shape_of, tensors_in(value)))
