"""Gradients whose reduction is pending: reduced together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from vescale.comm import AxisGroup, Pending, all_reduce, axis_group
from vescale.compat import AsyncCollectiveTensor, local_of, make_dtensor, make_spec
from vescale.placements import move_local

__all__ = ["complete"]

# (ranks that have parts, op of the one reduction, dtype, device)
_Kind = tuple[frozenset[int], str, torch.dtype, torch.device]


def complete(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, with Partial ones replaced by reduced ones, Replicate where they were Partial.

    One all-reduce over the union of the axes for all tensors whose Partial axes span the same ranks, on whichever mesh,
    and that have the same op, dtype and device; sums and averages go together. A tensor with a Partial of PyTorch's
    private kinds, or with several ops, is reduced by itself.
    """
    found = list(tensors)
    kinds: dict[_Kind, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, DTensor) or not any(p.is_partial() for p in tensor.placements):
            continue
        kind = _kind(tensor)
        if kind is None:
            found[index] = _rewrapped(tensor, _alone(tensor))
        else:
            kinds[kind].append(index)
    started = []
    for (_, op, _, _), indices in kinds.items():
        flat = torch.cat([_local(tensors[index]).reshape(-1) for index in indices])
        group = _group(tensors[indices[0]])  # the first one's on every rank
        pending = all_reduce(flat, op, group.group, asker="pending gradients") if group is not None else Pending(flat)
        started.append((pending, indices))
    for pending, indices in started:
        flat = pending.wait()
        sizes = [_local(tensors[index]).numel() for index in indices]
        for index, piece in zip(indices, flat.split(sizes)):
            tensor = tensors[index]
            assert isinstance(tensor, DTensor)
            divisor = _divisor(tensor)
            if divisor > 1:
                piece.div_(divisor)
            found[index] = _rewrapped(tensor, piece.view(_local(tensor).shape))
    return found


def _kind(tensor: DTensor) -> _Kind | None:
    """With what a pending reduction goes together; None for one that stays alone."""
    mesh = tensor.device_mesh
    pending = {axis: p for axis, p in enumerate(tensor.placements) if p.is_partial()}
    if mesh.get_coordinate() is None or any(type(p) is not Partial for p in pending.values()):
        return None
    ops = {p.reduce_op for p in pending.values() if isinstance(p, Partial)}
    adds = ops <= {"sum", "avg"}
    if not adds and len(ops) > 1:
        return None
    group = _group(tensor)
    ranks = group.ranks if group is not None else frozenset()
    return ranks, "sum" if adds else ops.pop(), tensor.dtype, _local(tensor).device


def _group(tensor: torch.Tensor) -> AxisGroup | None:
    """The ranks that have parts of a Partial tensor; None: this one alone."""
    assert isinstance(tensor, DTensor)
    mesh = tensor.device_mesh
    axes = tuple(axis for axis, p in enumerate(tensor.placements) if p.is_partial() and mesh.size(axis) > 1)
    return axis_group(mesh, axes) if axes else None


def _divisor(tensor: DTensor) -> int:
    """What makes averages of the sums: the number of ranks along the axes that average."""
    mesh = tensor.device_mesh
    return math.prod(mesh.size(axis) for axis, p in enumerate(tensor.placements) if p.is_partial("avg"))


def _alone(tensor: DTensor) -> torch.Tensor:
    target = [Replicate() if p.is_partial() else p for p in tensor.placements]
    return move_local(local_of(tensor), tensor.device_mesh, tensor.shape, tensor.placements, target).wait()


def _rewrapped(tensor: DTensor, local: torch.Tensor) -> DTensor:
    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    spec = make_spec(tensor.device_mesh, placements, tensor.shape, tensor.stride(), tensor.dtype)
    return make_dtensor(local, spec)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    local = local_of(tensor)
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local
