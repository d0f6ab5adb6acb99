"""Specs of contiguous DTensors, and the placements of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import make_spec
from vescale.errors import PlacementError
from vescale.placements._normalized_placements import normalize_placements
from vescale.placements._placement_kinds import without_partials
from vescale.placements._region import same_regions
from vescale.placements._strides import contiguous_stride


def resolve_gradient(
    caller: str,
    placements: Sequence[Placement],
    grad_placements: Sequence[Placement] | None,
    shape: Sequence[int],
    mesh: DeviceMesh,
) -> tuple[Placement, ...]:
    """The placements of a gradient: those given, or the tensor's own without Partial.

    Raises ValueError when they give a rank other elements than the tensor's placements do.
    """
    if grad_placements is None:
        return without_partials(placements)
    gradient = normalize_placements(grad_placements, shape, mesh)
    if not same_regions(tuple(shape), tuple(placements), gradient, tuple(mesh.shape)):
        raise PlacementError(
            f"{caller}: grad_placements {gradient} assign other elements to a rank than placements "
            f"{tuple(placements)}, but the gradient of a local tensor has its shape; keep the sharded axes as they "
            "are, and use Replicate or Partial on the others"
        )
    return gradient


def contiguous_spec(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype) -> Any:
    return make_spec(mesh, placements, shape, contiguous_stride(shape), dtype)
