"""Predicates and small conversions of placements: what kind a placement is and which tensor dim it shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import StridedShard
from vescale.errors import PlacementError
from vescale.placements._pieced_shards import FlattenedShard, InterleavedShard
from vescale.placements._ragged import RaggedShard


def shard_dim(placement: Placement) -> int | None:
    """The tensor dim that a shard-like placement (``Shard``, ``_StridedShard``, ``InterleavedShard``, ``FlattenedShard``)
    shards, or None."""
    if isinstance(placement, Shard | StridedShard | InterleavedShard | FlattenedShard):
        return int(placement.dim)
    return None


def is_pending(placement: Placement, *reductions: str) -> bool:
    """Whether a placement is Partial with one of these reductions. PyTorch's subclasses (a pending norm) answer that they
    are sums, and are not linear."""
    return type(placement) is Partial and placement.reduce_op in reductions


def at_dim(placement: Placement, dim: int) -> Placement:
    """The shard-like placement that divides tensor dim ``dim`` as ``placement`` divides its own."""
    if isinstance(placement, StridedShard):
        return StridedShard(dim, split_factor=placement.split_factor)
    if isinstance(placement, InterleavedShard):
        return InterleavedShard(dim, placement.num_chunks)
    if isinstance(placement, FlattenedShard):
        return FlattenedShard(dim, placement.size, placement.inner)
    return Shard(dim)


def from_front(placement: Placement, ndim: int) -> Placement:
    """``placement`` of a tensor with ``ndim`` dims, its own dim counted from the front. A tensor without dims has nothing to
    shard: it is Replicate."""
    dim = shard_dim(placement)
    if dim is not None and not ndim:
        return Replicate()
    return placement if dim is None or dim >= 0 else at_dim(placement, dim + ndim)


def shift_dim(placement: Placement, by: int, *, start: int = 0) -> Placement:
    """``placement`` after ``by`` tensor dims were inserted (negative: removed) before dim ``start`` or at it."""
    dim = shard_dim(placement)
    return placement if dim is None or dim < start else at_dim(placement, dim + by)


def split_factor(placement: Placement) -> int:
    """The number of pieces into which a shard-like placement divides its dim before it chunks each over the ranks; 1 for
    :class:`FlattenedShard`, whose pieces follow from the size of the dim."""
    if isinstance(placement, InterleavedShard):
        return placement.num_chunks
    return int(placement.split_factor) if isinstance(placement, StridedShard) else 1


def ragged_axis(placements: Sequence[Placement]) -> int | None:
    """The mesh axis with a ragged placement, or None. Raises ValueError when there are several."""
    axes = [axis for axis, placement in enumerate(placements) if isinstance(placement, RaggedShard)]
    if len(axes) > 1:
        raise PlacementError(
            f"ragged placements on mesh axes {axes} of {tuple(placements)}: the ragged placement is applied last, so "
            "that only one axis can have it; flatten the axes into one (mesh[names]._flatten()), or use Shard or "
            "Replicate on the others"
        )
    return axes[0] if axes else None


def is_sharded(placement: Placement) -> bool:
    """Whether ranks along the axis hold different elements."""
    return isinstance(placement, RaggedShard) or shard_dim(placement) is not None


def without_partials(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The placements after every pending reduction: Partial becomes Replicate.

    Those are also the placements of a gradient: every rank's contribution to a Partial tensor has the whole gradient.
    """
    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


# Strides of whole tensors: contiguous ones, and those that a local tensor implies.


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of ``shape``, as PyTorch computes them (a dim of size 0 counts as 1)."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


def stride_like(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a whole tensor of ``shape`` whose dims have the same order in memory as those of ``local``, and 0 where
    these are expanded.

    The result is the same on every rank, also where a rank holds one index of a dim that is not expanded: of two dims with
    equal strides, the one of local size 1 is the inner one.
    """
    order = sorted(range(len(shape)), key=lambda dim: (local.stride(dim), local.shape[dim] > 1, -dim))
    return _dense(shape, order, _expanded(local.shape, local.stride()))


def moved_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides of what :func:`vescale.compat.expanded_as` makes of a tensor with these: dims that are expanded stay so, and
    the others keep their order; contiguous where none is."""
    expanded = _expanded(shape, stride)
    return (
        _dense(shape, sorted(range(len(shape)), key=lambda dim: (stride[dim], -dim)), expanded)
        if any(expanded)
        else contiguous_stride(shape)
    )


def _expanded(shape: Sequence[int], stride: Sequence[int]) -> list[bool]:
    return [size > 1 and not step for size, step in zip(shape, stride)]


def _dense(shape: Sequence[int], order: Sequence[int], expanded: Sequence[bool]) -> tuple[int, ...]:
    """Without gaps, ``order`` has the innermost dim first."""
    strides, step = [0] * len(shape), 1
    for dim in order:
        if not expanded[dim]:
            strides[dim] = step
            step *= max(shape[dim], 1)
    return tuple(strides)
