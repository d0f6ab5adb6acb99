"""Specs of results, and the placements of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import make_spec
from vescale.placements._normalize import normalize_placements
from vescale.placements._region import same_regions

__all__ = ["contiguous_spec", "gradient_placements", "resolve_gradient", "row_major"]


def resolve_gradient(
    caller: str,
    placements: Sequence[Placement],
    grad_placements: Sequence[Placement] | None,
    shape: Sequence[int],
    mesh: DeviceMesh,
) -> tuple[Placement, ...]:
    """The placements of a gradient, checked: a gradient's local tensor has the elements of the local tensor."""
    if grad_placements is None:
        return gradient_placements(placements)
    gradient = normalize_placements(grad_placements, shape, mesh)
    if not same_regions(tuple(shape), tuple(placements), gradient, tuple(mesh.shape)):
        raise ValueError(
            f"{caller}: grad_placements {gradient} give a rank other elements than placements {tuple(placements)}, but "
            "the gradient of a local tensor has its shape; keep the sharded axes as they are, and use Replicate or "
            "Partial on the others"
        )
    return gradient


def gradient_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


def contiguous_spec(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype) -> Any:
    return make_spec(mesh, placements, shape, row_major(shape), dtype)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as PyTorch computes them (a dim of size 0 counts as 1)."""
    stride = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        stride[dim] = stride[dim + 1] * max(shape[dim + 1], 1)
    return tuple(stride)
