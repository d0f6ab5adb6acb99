"""Random numbers of micro-batches: each draws its rows of what one device draws for the whole batch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vescale.errors import RandomOpError
from vescale.placements import Region, contiguous_stride
from vescale.rng._engine import advance
from vescale.rng._random_ops import RandomOp, inplace_overloads

__all__ = ["Draw", "MicrobatchRows", "drawing_rows", "draws_rows", "rows_of_batch"]

aten = torch.ops.aten
_STATE = threading.local()


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
        if not args or not isinstance(args[0], torch.Tensor):
            return None
        tensor, parameter_dtype = args[0], None
        if func in inplace_overloads():
            op = RandomOp.of_call(func, args, kwargs)
        elif func in (aten.bernoulli_.Tensor, aten.bernoulli.default):
            op, parameter_dtype = RandomOp("bernoulli_"), (args[1] if len(args) > 1 else tensor).dtype
        elif func is aten.bernoulli.p:
            op = RandomOp("bernoulli_", (args[1],))
        elif func is aten.native_dropout.default:
            op = RandomOp("bernoulli_", (1.0 - args[1],))
        elif func is aten.rand_like.default:
            op = RandomOp("uniform_", (0.0, 1.0))
        elif func is aten.randn_like.default:
            op = RandomOp("normal_", (0.0, 1.0))
        else:
            return None
        dtype = kwargs.get("dtype") or tensor.dtype
        return cls(op, tuple(tensor.shape), tuple(tensor.stride()), dtype, parameter_dtype)

    def skip(self, generator: torch.Generator) -> None:
        """Advance the generator as the fill does, without generating numbers."""
        advance(self.shape, self.strides, self.op, self.dtype, generator, self.parameter_dtype)


@dataclass(frozen=True)
class MicrobatchRows:
    """The ``index``-th of ``count`` equal micro-batches of a batch.

    ``dims``: for the shape of each tensor that is drawn in a micro-batch's forward, the dim along which micro-batches
    follow one another in the whole batch's tensor; None for a tensor that does not depend on the batch, of which every
    micro-batch draws the same numbers.
    """

    count: int
    index: int
    dims: Mapping[tuple[int, ...], int | None]

    def dim(self, shape: tuple[int, ...]) -> int | None:
        if shape not in self.dims:
            raise RandomOpError(
                f"random numbers are drawn for a tensor of shape {shape}, for which none were in the trace of the forward "
                f"(shapes: {sorted(self.dims)}); which rows of the whole batch these are is not known. Draw for tensors "
                "that have the batch in one dim, the same in every forward"
            )
        return self.dims[shape]


@contextlib.contextmanager
def drawing_rows(rows: MicrobatchRows) -> Iterator[None]:
    """Inside, on this thread, random ops on DTensors draw their rows of the whole batch's tensors, and advance the generator
    as the whole batch's ops do. The kernels in C++ must be out of the way
    (:func:`vescale.compat.random_ops.without_native_fills`)."""
    before = getattr(_STATE, "rows", None)
    _STATE.rows = rows
    try:
        yield
    finally:
        _STATE.rows = before


def draws_rows() -> bool:
    """Whether this thread runs a micro-batch, so that random ops must not draw on plain local tensors."""
    return getattr(_STATE, "rows", None) is not None


def rows_of_batch(region: Region, strides: Sequence[int]) -> tuple[Region, tuple[int, ...]] | None:
    """``region`` of a micro-batch's tensor as a region of the whole batch's, and the strides of that; None where no
    micro-batch runs, or where the tensor does not depend on the batch."""
    rows: MicrobatchRows | None = getattr(_STATE, "rows", None)
    if rows is None:
        return None
    shape = region.global_shape
    dim = rows.dim(shape)
    if dim is None or rows.count == 1:
        return None
    shift = rows.index * shape[dim]
    whole = (*shape[:dim], shape[dim] * rows.count, *shape[dim + 1 :])
    intervals = tuple(
        tuple((start + shift, stop + shift) for start, stop in ranges) if index == dim else ranges
        for index, ranges in enumerate(region.intervals)
    )
    # Not stream_order(): a dim of one row has a place among the others in the whole batch's tensor.
    order = sorted(range(len(shape)), key=lambda d: -strides[d])
    dense = contiguous_stride([whole[d] for d in order])
    by_dim = dict(zip(order, dense))
    return Region(whole, intervals, region.flat), tuple(by_dim[d] for d in range(len(whole)))
