"""One conversion for all modules that get the same tensor with equal ``<in>`` entries (query, key and value projections).

It is one all-gather in forward instead of three, and one reduction in backward instead of three, because autograd adds the
gradients of the one result first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale.ops import convert
from vescale.runtime._activation import current_activation

__all__ = ["convert_once"]

Stage = Sequence[Placement | None]


@dataclass(frozen=True)
class _Converted:
    """A source and its result, kept alive so that no other tensor gets the ``id`` of the source, and their versions: an
    in-place write to either ends the sharing."""

    source: DTensor
    result: DTensor
    versions: tuple[int, int]

    def is_fresh(self) -> bool:
        return (self.source._version, self.result._version) == self.versions


def convert_once(
    x: DTensor, target: Stage, *, grad_source: Stage | None, grad_target: Stage | None, requester: str
) -> DTensor:
    """``convert``, or its earlier result within the forward of the module that passes ``x`` on.

    Results are kept until that module returns. Tensors of inference mode have no version, and are not shared.
    """
    activation = current_activation()
    if activation is None or x.is_inference():
        return convert(x, target, grad_source=grad_source, grad_target=grad_target, requester=requester)
    made: dict[Any, _Converted] = activation.frames[-1].converted
    stages = tuple(None if stage is None else tuple(stage) for stage in (target, grad_source, grad_target))
    key = (id(x), stages, torch.is_grad_enabled())
    held = made.get(key)
    if held is not None and held.is_fresh():
        return held.result
    result = convert(x, target, grad_source=grad_source, grad_target=grad_target, requester=requester)
    made[key] = _Converted(x, result, (x._version, result._version))
    return result
