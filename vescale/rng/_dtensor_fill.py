"""Random fills of DTensors: the region of this rank; replicated, Partial and absent local tensors."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import DTensorSpec, ThreadValue, local_of, make_dtensor, make_spec, spec_of, tell_draw
from vescale.errors import PlacementError, RandomOpError
from vescale.placements import Region, contiguous_stride, local_region
from vescale.rng._cpu_engine import GAP_ELEMENTS, SCRATCH_ELEMENTS
from vescale.rng._engine import advance, fill_region
from vescale.rng._random_ops import Fill, NormalBlocks, RandomOp, WordsPerElement, fill_of, fills
from vescale.rng._stream_spans import spans, stream_order

# ``counting_draws``: random fills that tell what they would draw, for programs that run without numbers.

NoteDraw = Callable[[str, torch.Tensor, int, int], None]
"""Told the name of a fill, this rank's part of the tensor, how many words of the generator it steps over, and how many spans
it generates."""

_threads = threading.local()


@contextmanager
def counting_draws(note: NoteDraw) -> Iterator[None]:
    """Inside, on this thread: a fill of a DTensor of which this rank holds a part calls ``note``, and generates nothing.

    The generator stays where it is. Fills for which the words of an element are not known, and those of DTensors that the
    rank holds as a whole, run as ever.
    """
    before = getattr(_threads, "note", None)
    _threads.note = note
    try:
        yield
    finally:
        _threads.note = before


def is_counted(fill: Fill, local: torch.Tensor, parameter: torch.Tensor | None) -> bool:
    """Whether a fill has been counted, so that nothing is to be generated."""
    note: NoteDraw | None = getattr(_threads, "note", None)
    if note is None or local.is_complex():
        return False
    rule = fill.op.cpu_rule(local.dtype, fill.numel, fill.is_row_major, None if parameter is None else parameter.dtype)
    if not isinstance(rule, WordsPerElement | NormalBlocks):
        return False
    skipped = max(rule.num_words(fill.numel) - rule.words * local.numel(), 0)
    note(fill.op.name, local, skipped, _num_spans(fill.region, fill.order, local.stride()))
    return True


@functools.lru_cache(maxsize=256)
def _num_spans(region: Region, order: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum(1 for _ in spans(region, order, strides, SCRATCH_ELEMENTS, GAP_ELEMENTS))


# Random numbers of micro-batches: each draws its rows of what one device draws for the whole batch.

_ROWS = ThreadValue("rows of a micro-batch")


@dataclass(frozen=True)
class Draw:
    """One random fill of a forward: ``op`` on a tensor of ``shape`` and ``strides``, as one device would run it."""

    op: RandomOp
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    parameter_dtype: torch.dtype | None = None

    @classmethod
    def of_call(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Draw | None:
        """The fill that a call of an ATen overload draws on a CPU; None for ops whose draws are not those of one fill."""
        if func not in fills() or not isinstance(args[0], torch.Tensor):
            return None
        tensor, (op, parameter) = args[0], fill_of(func, args, kwargs)
        dtype = kwargs.get("dtype") or tensor.dtype
        parameter_dtype = None if parameter is None else parameter.dtype
        return cls(op, tuple(tensor.shape), tuple(tensor.stride()), dtype, parameter_dtype)

    def skip(self, generator: torch.Generator) -> None:
        """Advance the generator as the fill does, without generating numbers."""
        advance(self.shape, self.strides, self.op, self.dtype, generator, self.parameter_dtype)


@dataclass(frozen=True)
class MicrobatchRows:
    """The ``index``-th of ``count`` equal micro-batches of a batch (2.5: two of five together, the first ones).

    ``dims``: for the shape of each tensor that is drawn in a micro-batch's forward, the dim along which micro-batches
    follow one another in the whole batch's tensor; None for a tensor that does not depend on the batch, of which every
    micro-batch draws the same numbers.
    """

    count: float
    index: int
    dims: Mapping[tuple[int, ...], int | None]

    def dim(self, shape: tuple[int, ...]) -> int | None:
        if shape not in self.dims:
            raise RandomOpError(
                f"random numbers are drawn for a tensor of shape {shape}, for which the trace of the forward has no "
                f"draw (shapes: {sorted(self.dims)}), so that it is not known which rows of the batch these are. Draw "
                "for tensors that have the batch in one dim, in the same way in every forward"
            )
        return self.dims[shape]


@contextlib.contextmanager
def drawing_rows(rows: MicrobatchRows) -> Iterator[None]:
    """Inside, on this thread and in its backwards, random ops on DTensors draw their rows of the whole batch's tensors, and
    advance the generator as the whole batch's ops do. The kernels in C++ must be out of the way
    (:func:`vescale.compat.random_ops.without_native_fills`)."""
    with _ROWS.within(rows):
        yield


def draws_rows() -> bool:
    """Whether this thread runs a micro-batch, so that random ops must not draw on plain local tensors."""
    return _ROWS.get() is not None


def rows_of_batch(region: Region, strides: Sequence[int]) -> tuple[Region, tuple[int, ...]] | None:
    """``region`` of a micro-batch's tensor as a region of the whole batch's, and the strides of that; None where no
    micro-batch runs, or where the tensor does not depend on the batch."""
    rows: MicrobatchRows | None = _ROWS.get()
    if rows is None:
        return None
    shape = region.global_shape
    dim = rows.dim(shape)
    if dim is None or rows.count == 1:
        return None
    shift = rows.index * shape[dim]
    whole = (*shape[:dim], round(shape[dim] * rows.count), *shape[dim + 1 :])
    intervals = tuple(
        tuple((start + shift, stop + shift) for start, stop in ranges) if index == dim else ranges
        for index, ranges in enumerate(region.intervals)
    )
    # Not stream_order(): a dim of one row has a place among the others in the whole batch's tensor.
    order = sorted(range(len(shape)), key=lambda d: -strides[d])
    dense = contiguous_stride([whole[d] for d in order])
    by_dim = dict(zip(order, dense))
    return Region(whole, intervals, region.flat), tuple(by_dim[d] for d in range(len(whole)))


def region_of(spec: DTensorSpec, what: str) -> Region | None:
    """The region of a DTensor that this rank holds, or None on a rank outside of its mesh.

    Raises RuntimeError for a Partial placement: its local tensors are terms of a sum, not parts of a tensor.
    """
    assert spec.tensor_meta is not None
    for axis, placement in enumerate(spec.placements):
        if placement.is_partial():
            raise RandomOpError(
                f"{what} on a DTensor of shape {tuple(spec.shape)} with {placement} on mesh axis {axis}: the terms of "
                "a pending sum cannot be drawn separately; expected Replicate or a shard on that axis: call "
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
