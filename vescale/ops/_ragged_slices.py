"""Rows of a ragged tensor: they are contiguous in its flattening, so every rank holds its part of them already."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from vescale.ops._call import OpCall
from vescale.ops._decision import Decision
from vescale.ops._interleaved_slices import slice_ranges
from vescale.ops._refit import refit_ragged, regions
from vescale.placements import Interval, Region, coordinates, ragged_axis, shard_dim, shift_dim

__all__ = ["row_slices"]


def row_slices(call: OpCall) -> Decision | None:
    """``select``, ``slice``, ``split`` and ``unbind`` along dim 0: local views, ragged with the parts of the rows that each
    rank holds.

    No communication. None when another axis shards dim 0, for a step, or when no placement describes the parts.
    """
    spec = call.operands[0]
    if spec.ndim == 0 or ragged_axis(spec.placements) is None or int(call.argument("dim", 0)) % spec.ndim != 0:
        return None
    if any(shard_dim(placement) == 0 for placement in spec.placements):
        return None
    drops_dim = call.name in ("select", "unbind")
    ranges = _single_rows(call, spec.shape[0]) if drops_dim else slice_ranges(call, spec.shape[0])
    if ranges is None:
        return None
    others = [shift_dim(placement, -drops_dim) for placement in spec.placements]
    held = regions(spec)
    outputs, cuts = [], []
    for first, last in ranges:
        shape = spec.shape[1:] if drops_dim else (last - first, *spec.shape[1:])
        parts = [_part(region, first, last) for region in held]
        placements = refit_ragged(spec, shape, others, [run for run, _ in parts])
        if placements is None:
            return None
        outputs.append(placements)
        cuts.append([cut for _, cut in parts])
    single = call.name in ("select", "slice")
    return Decision((spec.placements,), tuple(outputs), functools.partial(_cut, spec.mesh, cuts, single))


def _single_rows(call: OpCall, size: int) -> list[Interval]:
    if call.name == "unbind":
        return [(row, row + 1) for row in range(size)]
    row = int(call.argument("index")) % size
    return [(row, row + 1)]


def _part(region: Region, first: int, last: int) -> tuple[Interval, Interval]:
    """A rank's part of rows ``[first, last)``: as a run of their flattening, and as a slice of the local tensor."""
    assert region.flat is not None
    row = math.prod(region.shape[1:])
    low, high = (min(max(edge, first * row), last * row) for edge in region.flat)
    begin = region.flat[0]
    return (low - first * row, high - first * row), (low - begin, high - begin)


def _cut(
    mesh: DeviceMesh, cuts: Sequence[Sequence[Interval]], single: bool, local: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # only ranks of the mesh run local functions
    where = list(coordinates(mesh.shape)).index(tuple(coordinate))
    parts = [local[cut[where][0] : cut[where][1]] for cut in cuts]
    return parts[0] if single else parts
