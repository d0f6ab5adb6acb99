"""``slice``, ``select``, ``split``, ``unbind`` and their gradients."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from vescale.ops._call import OpCall, Placements
from vescale.ops._decision import Decision
from vescale.ops._interleaved_slices import chunk_slices
from vescale.ops._ragged_slices import row_slices
from vescale.ops._registration import handles
from vescale.ops._registry import register_aten
from vescale.ops.views import view_rule
from vescale.placements import own_region, ragged_axis, shard_dim, shift_dim

__all__: list[str] = []


def slice_rule(call: OpCall) -> Decision | None:
    """Chunks of an interleaved dim, the whole dim, or rows of a ragged tensor."""
    return chunk_slices(call) or view_rule(call) or row_slices(call)


def split_rule(call: OpCall) -> Decision | None:
    """Chunks of an interleaved dim, or rows of a ragged tensor."""
    return chunk_slices(call) or row_slices(call)


def gradient_rule(call: OpCall) -> Decision | None:
    """Gradients of ``slice`` and ``select`` along dims that are not sharded: each rank surrounds its part with zeros."""
    spec, shape = call.operands[0], tuple(call.meta.shape)
    dim = int(call.argument("dim")) % len(shape)
    if ragged_axis(spec.placements) is not None or math.prod(shape) == 0:
        return None
    selects = call.name == "select_backward"
    outputs = tuple(shift_dim(p, 1, start=dim) if selects else p for p in spec.placements)
    if any(shard_dim(placement) == dim for placement in outputs):
        return None
    return Decision((spec.placements,), (outputs,), functools.partial(_gradient, call.op, spec.mesh, shape, outputs))


def _gradient(
    op: Any, mesh: DeviceMesh, shape: tuple[int, ...], placements: Placements, local: torch.Tensor, _: Any, *rest: Any
) -> torch.Tensor:
    region = own_region(shape, placements, mesh)
    assert region is not None  # only ranks of the mesh run local functions
    result: torch.Tensor = op(local, region.local_shape, *rest)
    return result


def _counts_from_the_end(op: Any, schema: Any) -> bool:
    return bool(schema.args_schema[2] < 0)


@handles(torch.ops.aten.select_backward.default, applies=_counts_from_the_end)
def _select_backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With the dim counted from the first one: PyTorch's rule takes ``-1`` for a dim before all others, and labels the
    gradient of ``x.select(-1, 0)`` as cut along the dim after the one that is cut."""
    grad, sizes, dim, index = args
    return op(grad, sizes, dim + len(sizes), index)


register_aten("slice", rule=slice_rule)
register_aten("split split_with_sizes", rule=split_rule)
register_aten("select unbind", rule=row_slices)
register_aten("slice_backward select_backward", rule=gradient_rule)
