"""Random fills of complex tensors: torch fills their real view, twice as many elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from vescale.placements import Region
from vescale.rng._ops import RandomOp

__all__ = ["as_real"]


def as_real(
    op: RandomOp, local: torch.Tensor, region: Region, strides: Sequence[int]
) -> tuple[RandomOp, torch.Tensor, Region, tuple[int, ...]]:
    """The same fill of the real view; ``normal_`` has half the variance there."""
    if op.name == "normal_":
        mean, std = _normal_arguments(*op.arguments)
        op = RandomOp("normal_", (mean, std / math.sqrt(2.0)))
    elif op.name != "uniform_":  # the native op refused all others
        raise AssertionError(f"{op.name} on {local.dtype}")
    flat = None if region.flat is None else (2 * region.flat[0], 2 * region.flat[1])
    real = Region((*region.global_shape, 2), (*region.intervals, ((0, 2),)), flat)
    view = torch.view_as_real(local)
    view = view if flat is None else view.flatten()
    return op, view, real, (*(2 * s for s in strides), 1)


def _normal_arguments(mean: Any = 0.0, std: Any = 1.0) -> tuple[float, float]:
    return float(mean), float(std)
