"""The last step of a reduction: combining a few values of each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from vescale.comm import all_gather_v, all_reduce, axis_group
from vescale.ops._call import Placements
from vescale.placements import is_sharded


def reduction_axes(placements: Placements) -> tuple[int, ...]:
    """The mesh axes along which ranks hold different elements."""
    return tuple(axis for axis, placement in enumerate(placements) if is_sharded(placement))


def gather_ranks(values: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int]) -> torch.Tensor:
    """``values`` (flat, the same length everywhere) of all ranks along ``axes``, one row for each.

    Used where an all-reduce would not do what one device does: a maximum loses NaN, gloo has no boolean or.
    """
    if not axes:
        return values.unsqueeze(0)
    group = axis_group(mesh, axes)
    sizes = [values.numel()] * group.size
    return all_gather_v(values.contiguous(), sizes, group.group, requester="reduction").wait().view(group.size, -1)


def add_ranks(values: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int]) -> torch.Tensor:
    """The sum of ``values`` over all ranks along ``axes``; one all-reduce."""
    if not axes:
        return values
    if values.is_complex():
        return gather_ranks(values.reshape(-1), mesh, axes).sum(0).view(values.shape)
    return all_reduce(values, "sum", axis_group(mesh, axes).group, requester="reduction").wait()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision is accumulated in float32, as kernels on one device do."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def neutral_extremum(like: torch.Tensor, *, largest: bool) -> torch.Tensor:
    """The identity of max (``largest``) or min for the dtype of ``like``, without dims."""
    if like.dtype == torch.bool:
        return like.new_full((), not largest)
    if like.dtype.is_floating_point:
        return like.new_full((), -math.inf if largest else math.inf)
    bounds = torch.iinfo(like.dtype)
    return like.new_full((), bounds.min if largest else bounds.max)
