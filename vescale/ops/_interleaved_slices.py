"""Slices of an interleaved dim along its chunks: every rank holds its part of each chunk already."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import DTensorSpec
from vescale.ops._call import OpCall, Placements
from vescale.ops._decision import Decision
from vescale.placements import InterleavedShard, Interval, coordinates, local_region, own_region, ragged_axis


def chunk_slices(call: OpCall) -> Decision | None:
    """Slices whose bounds are chunk bounds: local views, ``Shard(dim)`` for one chunk and ``InterleavedShard`` for several.

    No communication. None when a bound is within a chunk.
    """
    spec = call.operands[0]
    if spec.ndim == 0 or ragged_axis(spec.placements) is not None:
        return None
    dim = int(call.argument("dim", 0)) % spec.ndim
    if not any(isinstance(p, InterleavedShard) and p.dim == dim for p in spec.placements):
        return None
    ranges = slice_ranges(call, spec.shape[dim])
    if ranges is None:
        return None
    found = [_held(spec, dim, cut) for cut in ranges]
    outputs = [placements for placements in found if placements is not None]
    if len(outputs) < len(ranges):
        return None
    cuts = functools.partial(_cut, spec.mesh, tuple(spec.shape), spec.placements, dim, ranges, call.name == "slice")
    return Decision((spec.placements,), tuple(outputs), cuts)


def slice_ranges(call: OpCall, size: int) -> list[Interval] | None:
    """The index ranges that ``slice``, ``split`` or ``split_with_sizes`` take from a dim of ``size``, one for each result;
    None for a slice with a step."""
    if call.name == "slice":
        start, stop = call.argument("start"), call.argument("end")
        if call.argument("step", 1) != 1:
            return None
        first, last, _ = slice(start, stop).indices(size)
        return [(first, max(first, last))]
    if call.name == "split":
        length = int(call.argument("split_size"))
        return [(start, min(start + length, size)) for start in range(0, size, length)] if length else None
    ranges, start = [], 0
    for length in call.argument("split_sizes"):
        ranges.append((start, start + length))
        start += length
    return ranges


def _held(spec: DTensorSpec, dim: int, cut: Interval) -> Placements | None:
    """The placements that describe, for indices ``cut`` of ``dim``, what each rank holds of them already."""
    if cut == (0, spec.shape[dim]):
        return spec.placements
    shape = (*spec.shape[:dim], cut[1] - cut[0], *spec.shape[dim + 1 :])
    mesh_shape = tuple(spec.mesh.shape)
    most = max(p.num_chunks for p in spec.placements if isinstance(p, InterleavedShard) and p.dim == dim)
    for num_chunks in range(1, most + 1):
        candidate: Placement = Shard(dim) if num_chunks == 1 else InterleavedShard(dim, num_chunks)
        placements = tuple(
            candidate if isinstance(p, InterleavedShard) and p.dim == dim else p for p in spec.placements
        )
        if all(
            _shifted(local_region(spec.shape, spec.placements, mesh_shape, where).intervals[dim], cut)
            == _shifted(local_region(shape, placements, mesh_shape, where).intervals[dim], (0, shape[dim]))
            for where in coordinates(mesh_shape)
        ):
            return placements
    return None


def _shifted(held: Sequence[Interval], cut: Interval) -> list[Interval]:
    """The held ranges within ``cut``, counted from its start; adjacent ones are merged."""
    found: list[Interval] = []
    for start, stop in held:
        low, high = max(start, cut[0]) - cut[0], min(stop, cut[1]) - cut[0]
        if low < high:
            if found and found[-1][1] == low:
                found[-1] = (found[-1][0], high)
            else:
                found.append((low, high))
    return found


def _cut(
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    placements: Placements,
    dim: int,
    ranges: Sequence[Interval],
    single: bool,
    local: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    region = own_region(shape, placements, mesh)
    assert region is not None  # only ranks of the mesh run local functions
    held = region.intervals[dim]
    parts = []
    for cut in ranges:
        before = sum(stop - start for start, stop in _shifted(held, (0, cut[0])))
        length = sum(stop - start for start, stop in _shifted(held, cut))
        parts.append(local.narrow(dim, before, length))
    return parts[0] if single else parts
