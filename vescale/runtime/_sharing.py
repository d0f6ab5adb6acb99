"""One conversion for all modules that are handed the same tensor with the same entry (query, key and value projections).

Each of them has an ``<in>`` entry of its own. Converting once means one all-gather in the forward instead of three; and as
autograd adds the gradients of the one result before it passes them on, one reduction in the backward instead of three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale.ops import convert
from vescale.runtime._active import current

__all__ = ["convert_once"]

Stage = Sequence[Placement | None]


@dataclass(frozen=True)
class _Converted:
    """A result and its source, both kept alive so that no other tensor gets the source's identity, with their versions:
    a module that writes to either in place ends the sharing."""

    source: DTensor
    result: DTensor
    versions: tuple[int, int]

    def is_fresh(self) -> bool:
        return (self.source._version, self.result._version) == self.versions


def convert_once(
    x: DTensor, target: Stage, *, grad_source: Stage | None, grad_target: Stage | None, requester: str
) -> DTensor:
    """``convert``, or its result of a moment ago, within the forward of the module that hands ``x`` out.

    Kept until that module returns. Tensors made in inference mode have no version, and are not shared.
    """
    activation = current()
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
