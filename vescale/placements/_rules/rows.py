"""Taking rows out of a ragged tensor: they follow each other in the line that is cut, so every rank has its part of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import StridedShard
from vescale.placements._interleaved import InterleavedShard
from vescale.placements._kinds import ragged_axis, shard_dim
from vescale.placements._ragged import RaggedShard
from vescale.placements._region import Interval, Region
from vescale.placements._rules._call import Decision, OpCall, Placements
from vescale.placements._rules._refit import coordinates, refit_ragged, regions
from vescale.placements._rules.chunks import cut_ranges

__all__ = ["rows_rule"]


def rows_rule(call: OpCall) -> Decision | None:
    """``select``, ``slice``, ``split``, ``chunk`` and ``unbind`` along dim 0 are local views, ragged with what each rank
    holds of the rows. None when another axis cuts dim 0, for a step, or when no placement describes the parts."""
    if call.name not in ("select", "slice", "split", "split_with_sizes", "unbind") or len(call.operands) != 1:
        return None
    spec = call.operands[0]
    if spec.ndim == 0 or ragged_axis(spec.placements) is None or int(call.argument("dim", 0)) % spec.ndim != 0:
        return None
    if any(shard_dim(placement) == 0 for placement in spec.placements):
        return None
    drops_dim = call.name in ("select", "unbind")
    ranges = _single_rows(call, spec.shape[0]) if drops_dim else cut_ranges(call, spec.shape[0])
    if ranges is None:
        return None
    others: Placements = tuple(_shifted(placement, drops_dim) for placement in spec.placements)
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
    """What a rank holds of rows ``[first, last)``: as a run of their line, and as a slice of the local tensor."""
    assert region.flat is not None
    row = math.prod(region.shape[1:])
    low, high = (min(max(edge, first * row), last * row) for edge in region.flat)
    begin = region.flat[0]
    return (low - first * row, high - first * row), (low - begin, high - begin)


def _shifted(placement: Placement, drops_dim: bool) -> Placement:
    """The placement of a tensor that may have lost dim 0."""
    dim = shard_dim(placement)
    if dim is None or not drops_dim:
        return Replicate() if isinstance(placement, RaggedShard) else placement
    if isinstance(placement, InterleavedShard):
        return InterleavedShard(dim - 1, placement.num_chunks)
    if isinstance(placement, StridedShard):
        return StridedShard(dim - 1, split_factor=placement.split_factor)
    return Shard(dim - 1)


def _cut(
    mesh: DeviceMesh, cuts: Sequence[Sequence[Interval]], single: bool, local: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # only ranks of the mesh run local functions
    where = list(coordinates(mesh.shape)).index(tuple(coordinate))
    parts = [local[cut[where][0] : cut[where][1]] for cut in cuts]
    return parts[0] if single else parts
