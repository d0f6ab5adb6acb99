"""Outputs of a model in static mode, as DTensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale.static._call_site_functions import map_in_order
from vescale.static._hidden_tensors import hidden_slots
from vescale.static._missing_gradients import without_gradient
from vescale.static._tensor_type import TensorType, UnrecordedError

__all__ = ["handed_out"]


def handed_out(result: Any, outputs: Sequence[TensorType], hidden: Sequence[TensorType]) -> Any:
    """What a forward has returned, with DTensors of these types; ``hidden``: of tensors in its objects."""
    if type(result) is torch.Tensor and len(outputs) == 1 and not hidden:
        return _hand_out(outputs[0], result)
    slots = hidden_slots(result)
    if len(slots) != len(hidden):
        raise UnrecordedError("objects in the output hold other tensors than recorded")
    for slot, kind in zip(slots, hidden, strict=True):
        slot.set(kind.to_global(slot.get(), "output"))
    return map_in_order(result, [functools.partial(_hand_out, kind) for kind in outputs])


def _hand_out(kind: TensorType, local: torch.Tensor) -> torch.Tensor:
    """An output as a DTensor."""
    x = kind.to_global(local, "output")
    if kind.grad is None and x.requires_grad and isinstance(x, DTensor):
        x = without_gradient(x, "an output")
    return x
