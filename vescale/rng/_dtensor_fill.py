"""Random fills of DTensors: the region of this rank; replicated, Partial and absent local tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import DTensorSpec, local_of, make_dtensor, make_spec, spec_of, tell_draw
from vescale.errors import PlacementError, RandomOpError
from vescale.placements import Region, contiguous_stride, local_region
from vescale.rng._counted_draws import is_counted
from vescale.rng._engine import fill_region
from vescale.rng._fill_request import Fill
from vescale.rng._microbatch_rows import rows_of_batch
from vescale.rng._random_ops import RandomOp
from vescale.rng._stream_spans import stream_order

__all__ = [
    "count_write",
    "empty",
    "empty_like",
    "fill",
    "outside_mesh",
    "part_of_whole",
    "region_of",
    "replicated",
    "whole_of",
]


def region_of(spec: DTensorSpec, what: str) -> Region | None:
    """The region of a DTensor that this rank holds, or None on a rank outside of its mesh.

    Raises RuntimeError for a Partial placement: its local tensors are terms of a sum, not parts of a tensor.
    """
    assert spec.tensor_meta is not None
    for axis, placement in enumerate(spec.placements):
        if placement.is_partial():
            raise RandomOpError(
                f"{what} on a DTensor of shape {tuple(spec.shape)} with {placement} on mesh axis {axis}: the terms of "
                "a sum have no random values of their own; expected Replicate or a shard there: call "
                ".redistribute() first"
            )
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        return None
    return local_region(tuple(spec.shape), spec.placements, tuple(spec.mesh.shape), tuple(coordinate))


def outside_mesh(spec: DTensorSpec) -> bool:
    return spec.mesh.get_coordinate() is None


def fill(
    dtensor: DTensor, op: RandomOp, generator: torch.Generator | None = None, parameter: DTensor | None = None
) -> None:
    """Fill a DTensor with ``op``: each rank with its part of the bits of one device. No communication.

    On every rank that calls this, the generator (``generator``, or the default one of the local tensor's device) advances
    as on one device; also if the shard is empty, and outside of the mesh. ``parameter`` has the shape and placements of
    ``dtensor``. Raises RuntimeError for Partial placements.
    """
    spec = spec_of(dtensor)
    region = region_of(spec, op.name)
    tell_draw(spec, op.name, generator)
    local = local_of(dtensor).detach()
    terms = None if parameter is None else local_of(parameter).detach()
    assert spec.tensor_meta is not None
    strides = tuple(spec.tensor_meta.stride)
    if region is None:
        # The local tensor of a rank outside of the mesh: an empty region on the mesh's device type.
        device = torch.device(spec.mesh.device_type)
        region = Region(tuple(spec.shape), tuple(((0, size),) for size in spec.shape), (0, 0))
        local = torch.empty(0, dtype=local.dtype, device=device)
        terms = None if terms is None else torch.empty(0, dtype=terms.dtype, device=device)
    elif local.shape != region.local_shape:
        raise RandomOpError(
            f"{op.name} on a DTensor of shape {region.global_shape} with placements {spec.placements}: this rank's local "
            f"tensor has shape {tuple(local.shape)}, expected {region.local_shape}; build DTensors of uneven shards with "
            "distribute_tensor, or shard as torch.chunk does"
        )
    of_batch = rows_of_batch(region, strides)
    if of_batch is not None:
        region, strides = of_batch
    if local.numel() == math.prod(region.global_shape) and region.flat is None and local.stride() == strides:
        op.fill(local, generator, terms)  # this rank holds everything, laid out as on one device
    else:
        part = Fill(op, region, strides)
        if not is_counted(part, local, terms):
            fill_region(local, part, generator, terms)
    count_write(dtensor)


def count_write(dtensor: DTensor) -> None:
    """In the version of the local tensor, which is that of its storage for backward and for boundaries of modules: what runs
    in place of a random op does not count there by itself."""
    local = local_of(dtensor)
    if not local.is_inference():
        increment_version(local)


def empty(
    shape: Sequence[int],
    dtype: torch.dtype,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    strides: Sequence[int] | None = None,
) -> DTensor:
    """An uninitialized DTensor with global ``shape`` and ``strides`` (None: row-major). Each rank allocates its own part.

    ``placements`` None: replicated. The dims of the local tensor have the memory order of the global one.
    """
    placements = tuple(placements or (Replicate(),) * mesh.ndim)
    if len(placements) != mesh.ndim:
        raise PlacementError(
            f"{len(placements)} placements {placements} for a mesh of {mesh.ndim} axes; expected one placement per axis"
        )
    strides = tuple(strides) if strides is not None else contiguous_stride(shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        local = torch.empty(0, dtype=dtype, device=mesh.device_type)
    else:
        region = local_region(tuple(shape), placements, tuple(mesh.shape), tuple(coordinate))
        order = stream_order(shape, strides) if region.flat is None else (0,)
        in_order = torch.empty([region.local_shape[dim] for dim in order], dtype=dtype, device=mesh.device_type)
        local = in_order.permute(sorted(range(len(order)), key=order.__getitem__))
    return make_dtensor(local, make_spec(mesh, placements, shape, strides, dtype))


def empty_like(
    source: DTensor, dtype: torch.dtype | None = None, memory_format: torch.memory_format = torch.preserve_format
) -> DTensor:
    """``torch.empty_like`` with the strides of one device; DTensor's own ignores ``memory_format`` after the first call.

    Raises RuntimeError for a Partial source.
    """
    spec = spec_of(source)
    region_of(spec, "empty_like")
    assert spec.tensor_meta is not None
    shape, dtype = spec.tensor_meta.shape, dtype or spec.tensor_meta.dtype
    looks = torch.empty_strided(shape, spec.tensor_meta.stride, device="meta")
    strides = torch.empty_like(looks, memory_format=memory_format).stride()
    return empty(shape, dtype, spec.mesh, spec.placements, strides)


def part_of_whole(whole: torch.Tensor, region: Region) -> torch.Tensor:
    """This rank's local tensor of a whole tensor that every rank holds. No communication."""
    if region.local_shape == region.global_shape:
        return whole
    local = torch.empty(region.local_shape, dtype=whole.dtype, device=whole.device)
    for box in region.boxes:
        source = whole[tuple(slice(start, start + size) for start, size in zip(box.offset, box.sizes, strict=True))]
        box.view(local).copy_(source)
    return local


def replicated(dtensor: DTensor) -> DTensor:
    """The same tensor replicated on the mesh (by an all-gather or all-reduce, if needed)."""
    mesh = dtensor.device_mesh
    return dtensor.redistribute(mesh, [Replicate()] * mesh.ndim)


def whole_of(value: Any) -> Any:
    """The whole plain tensor of a DTensor (communication as in :func:`replicated`); other values unchanged."""
    return local_of(replicated(value)) if isinstance(value, DTensor) else value
