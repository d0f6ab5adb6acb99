"""The norm of tensors whose parts are on different ranks of different meshes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from vescale.comm import AxisGroup, Pending, all_gather_v, all_reduce, axis_group
from vescale.compat import AsyncCollectiveTensor, foreach_norm, has_foreach, local_of

__all__ = ["Part", "part_of", "result_dtype", "total_norm"]

_REQUESTER = "norm of gradients"


@dataclass(frozen=True)
class Part:
    """This rank's part of a tensor.

    Attributes:
        local: the part; maybe empty.
        group: the ranks that hold the other parts; None when this rank has the whole tensor.
    """

    local: torch.Tensor
    group: AxisGroup | None = None


def part_of(tensor: torch.Tensor) -> Part:
    """Raises ValueError on a rank outside the tensor's mesh, and for a pending reduction."""
    if not isinstance(tensor, DTensor):
        return Part(tensor)
    mesh, local = tensor.device_mesh, local_of(tensor)
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"a gradient of shape {tuple(tensor.shape)} is on {mesh}, which rank {dist.get_rank()} is not part of, so "
            "that it cannot know that gradient's part of the norm; give every rank gradients of its own meshes only, and "
            "combine get_total_norm() of the sets over all ranks"
        )
    axes = tuple(
        axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate() and mesh.size(axis) > 1
    )
    if any(tensor.placements[axis].is_partial() for axis in axes):
        raise ValueError(f"the norm of a pending reduction {tensor.placements} is not the norm of its parts; reduce it")
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    return Part(local, axis_group(mesh, axes) if axes else None)


def result_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype that the norm has on one device: real, and wide enough for all."""
    dtype: torch.dtype | None = None
    for tensor in tensors:
        dtype = tensor.dtype.to_real() if dtype is None else torch.promote_types(dtype, tensor.dtype.to_real())
    return dtype or torch.get_default_dtype()


def total_norm(parts: Sequence[Part], order: float, foreach: bool | None = None) -> torch.Tensor:
    """The norm of order ``order`` of all parts of all ranks together; the same number on every rank of a group.

    One collective for each distinct set of ranks, all started before the first is waited for: of one number, or for order
    0 of one number a tensor. Numbers are combined in float64, so that meshes do not show. The result is float32, float64 for
    float64 tensors.
    """
    if not parts:
        return torch.tensor(0.0)
    device = parts[0].local.device
    norms = _local_norms([part.local for part in parts], order, foreach)
    by_ranks: dict[frozenset[int], list[int]] = defaultdict(list)
    for index, part in enumerate(parts):
        by_ranks[part.group.ranks if part.group is not None else frozenset()].append(index)
    pending = []
    for indices in by_ranks.values():
        numbers = _contribution([norms[index] for index in indices], order, parts[indices[0]].local.device)
        pending.append(_combine(numbers, parts[indices[0]].group, order))
    combined = torch.cat([_finished(p, order).to(device) for p in pending])
    if order == 0:
        total = torch.count_nonzero(combined).double()
    elif math.isinf(order):
        total = combined.amax() if order > 0 else combined.amin()
    else:
        total = combined.sum()
        total = total.sqrt() if order == 2 else total.pow(1 / order)
    return total.to(torch.promote_types(result_dtype([part.local for part in parts]), torch.float32))


def _local_norms(locals_: Sequence[torch.Tensor], order: float, foreach: bool | None) -> list[torch.Tensor | None]:
    """The norm of each part in at least float32; None for empty ones, which some orders are not defined for."""
    found: list[torch.Tensor | None] = [None] * len(locals_)
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, local in enumerate(locals_):
        if local.numel():
            kinds[local.device, local.dtype].append(index)
    for (_, dtype), indices in kinds.items():
        wide = torch.promote_types(dtype.to_real(), torch.float32)
        group = [locals_[index] for index in indices]
        if foreach is not False and has_foreach(group):
            norms = foreach_norm(group, order, wide)
        elif dtype.is_complex:
            norms = [torch.linalg.vector_norm(local, order) for local in group]
        else:
            norms = [torch.linalg.vector_norm(local, order, dtype=wide) for local in group]
        for index, norm in zip(indices, norms):
            found[index] = norm
    return found


def _contribution(norms: Sequence[torch.Tensor | None], order: float, device: torch.device) -> torch.Tensor:
    """What this rank adds for the tensors of one group: a sum of powers, an extremum, or for order 0 whether each tensor
    has an element that is not zero."""
    if order == 0:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([zero if norm is None else norm.to(zero) for norm in norms]).ne(0).double()
    known = [norm.to(device, torch.float64) for norm in norms if norm is not None]
    if not known:
        neutral = math.inf if order == -math.inf else 0.0
        return torch.full((1,), neutral, dtype=torch.float64, device=device)
    stacked = torch.stack(known)
    if math.isinf(order):
        return (stacked.amax() if order > 0 else stacked.amin()).view(1)
    return stacked.pow(order).sum().view(1)


def _combine(numbers: torch.Tensor, group: AxisGroup | None, order: float) -> Pending:
    if group is None:
        return Pending(numbers)
    if math.isinf(order):  # gathered, because an all-reduced maximum may lose nan
        return all_gather_v(numbers, [1] * group.size, group.group, requester=_REQUESTER)
    return all_reduce(numbers, "sum", group.group, requester=_REQUESTER)


def _finished(pending: Pending, order: float) -> torch.Tensor:
    numbers = pending.wait()
    if not math.isinf(order):
        return numbers
    return (numbers.amax() if order > 0 else numbers.amin()).view(1)
