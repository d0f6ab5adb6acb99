"""Gradients of ``slice`` and ``select`` along dims that are not sharded: zeros around them, on each rank for its part."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from vescale.placements._kinds import at_dim, ragged_axis, shard_dim
from vescale.placements._region import local_region
from vescale.placements._rules._call import Decision, OpCall, Placements, names

__all__ = ["slice_gradient_rule"]

_GRADIENTS = names("slice_backward select_backward")


def slice_gradient_rule(call: OpCall) -> Decision | None:
    if call.name not in _GRADIENTS:
        return None
    spec, shape = call.operands[0], tuple(call.meta.shape)
    dim = int(call.argument("dim")) % len(shape)
    if ragged_axis(spec.placements) is not None or math.prod(shape) == 0:
        return None
    selected = call.name == "select_backward"
    outputs = tuple(_shifted(p, dim) if selected else p for p in spec.placements)
    if any(shard_dim(placement) == dim for placement in outputs):
        return None
    return Decision((spec.placements,), (outputs,), functools.partial(_local, call.op, spec.mesh, shape, outputs))


def _shifted(placement: Placement, dim: int) -> Placement:
    """The placement of a tensor with one more dim at ``dim``."""
    own = shard_dim(placement)
    return placement if own is None or own < dim else at_dim(placement, own + 1)


def _local(
    op: Any, mesh: DeviceMesh, shape: tuple[int, ...], placements: Placements, local: torch.Tensor, _: Any, *rest: Any
) -> torch.Tensor:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # only ranks of the mesh run local functions
    sizes = local_region(shape, placements, tuple(mesh.shape), coordinate).local_shape
    result: torch.Tensor = op(local, sizes, *rest)
    return result
