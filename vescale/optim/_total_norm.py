"""The norm of tensors whose parts are on different ranks of different meshes."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement

from vescale.comm import AxisGroup, Pending, all_gather_v, all_reduce, axis_group
from vescale.compat import AsyncCollectiveTensor, DTensorSpec, foreach_norm, has_foreach, local_of, spec_of
from vescale.errors import TotalNormError

__all__ = ["parts_of", "result_dtype", "total_norm"]

_REQUESTER = "norm of gradients"


def parts_of(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[AxisGroup | None]]:
    """(this rank's part of each tensor, maybe empty; the ranks that hold the other parts, None where it has all of them)

    Raises ValueError on a rank outside of a tensor's mesh, and for a pending reduction.
    """
    locals_, groups = [], []
    known: dict[tuple[int, tuple[Placement, ...]], AxisGroup | None] = {}
    for tensor in tensors:
        group = None
        if isinstance(tensor, DTensor):
            spec, tensor = spec_of(tensor), local_of(tensor)
            key = id(spec.mesh), spec.placements
            group = known[key] if key in known else known.setdefault(key, _ranks_of(spec))
            if isinstance(tensor, AsyncCollectiveTensor):
                tensor = tensor.wait()
        locals_.append(tensor)
        groups.append(group)
    return locals_, groups


def _ranks_of(spec: DTensorSpec) -> AxisGroup | None:
    mesh, placements = spec.mesh, spec.placements
    if mesh.get_coordinate() is None:
        raise TotalNormError(
            f"a gradient of shape {tuple(spec.shape)} is on {mesh}, which rank {dist.get_rank()} is not part of, so "
            "that it cannot know that gradient's part of the norm; give every rank gradients of its own meshes only, and "
            "combine get_total_norm() of the sets over all ranks"
        )
    axes = tuple(
        axis for axis, placement in enumerate(placements) if not placement.is_replicate() and mesh.size(axis) > 1
    )
    if any(placements[axis].is_partial() for axis in axes):
        raise TotalNormError(f"the norm of a pending reduction {placements} is not the norm of its parts; reduce it")
    return axis_group(mesh, axes) if axes else None


def result_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype that the norm has on one device: real, and wide enough for all."""
    dtypes = {tensor.dtype for tensor in tensors}
    if not dtypes:
        return torch.get_default_dtype()
    return functools.reduce(torch.promote_types, (dtype.to_real() for dtype in dtypes))


def total_norm(
    locals_: Sequence[torch.Tensor], groups: Sequence[AxisGroup | None], order: float, foreach: bool | None = None
) -> torch.Tensor:
    """The norm of order ``order`` of all parts of all ranks together; the same number on every rank of a group.

    One collective for each distinct set of ranks, all started before the first is waited for: of one number, or for order
    0 of one number a tensor. Numbers are combined in float64, so that meshes do not show. The result is float32, float64 for
    float64 tensors.

    Args:
        locals_: this rank's parts.
        groups: for each part, the ranks that hold the others (:func:`parts_of`).
        order: any number.
        foreach: as in ``clip_grad_norm_``.
    """
    if not locals_:
        return torch.tensor(0.0)
    device = locals_[0].device
    norms, is_known = _local_norms(locals_, order, foreach)
    by_ranks: dict[frozenset[int], list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        by_ranks[group.ranks if group is not None else frozenset()].append(index)
    pending = []
    for indices in by_ranks.values():
        numbers = _contribution(norms, is_known, indices, order).to(locals_[indices[0]].device)
        pending.append(_combine(numbers, groups[indices[0]], order))
    combined = torch.cat([_finished(p, order).to(device) for p in pending])
    if order == 0:
        total = torch.count_nonzero(combined).double()
    elif math.isinf(order):
        total = combined.amax() if order > 0 else combined.amin()
    else:
        total = combined.sum()
        total = total.sqrt() if order == 2 else total.pow(1 / order)
    return total.to(torch.promote_types(result_dtype(locals_), torch.float32))


def _local_norms(
    locals_: Sequence[torch.Tensor], order: float, foreach: bool | None
) -> tuple[torch.Tensor, list[bool]]:
    """(the norm of each part, computed in at least float32, as float64 on the first one's device; whether it has one: some
    orders are not defined for empty parts)"""
    is_known = [local.numel() > 0 for local in locals_]
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, local in enumerate(locals_):
        if is_known[index]:
            kinds[local.device, local.dtype].append(index)
    norms: torch.Tensor | None = None
    for (_, dtype), indices in kinds.items():
        wide = torch.promote_types(dtype.to_real(), torch.float32)
        group = [locals_[index] for index in indices]
        if foreach is not False and has_foreach(group):
            found = foreach_norm(group, order, wide)
        elif dtype.is_complex:
            found = [torch.linalg.vector_norm(local, order) for local in group]
        else:
            found = [torch.linalg.vector_norm(local, order, dtype=wide) for local in group]
        stacked = torch.stack(found).to(locals_[0].device, torch.float64)
        if len(indices) == len(locals_):
            return stacked, is_known
        if norms is None:
            norms = stacked.new_zeros(len(locals_))
        norms[indices] = stacked
    return torch.zeros(
        len(locals_), dtype=torch.float64, device=locals_[0].device
    ) if norms is None else norms, is_known


def _contribution(norms: torch.Tensor, is_known: Sequence[bool], indices: Sequence[int], order: float) -> torch.Tensor:
    """What this rank adds for the tensors of one group: a sum of powers, an extremum, or for order 0 whether each tensor
    has an element that is not zero."""
    if order == 0:
        return norms[indices].ne(0).double()
    known = [index for index in indices if is_known[index]]
    if not known:
        return norms.new_full((1,), math.inf if order == -math.inf else 0.0)
    chosen = norms if len(known) == len(norms) else norms[known]
    if math.isinf(order):
        return (chosen.amax() if order > 0 else chosen.amin()).view(1)
    return chosen.pow(order).sum().view(1)


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
