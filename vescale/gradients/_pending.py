"""``reduce_pending``: completes DTensors whose reduction is pending, several in one collective."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale.compat import make_dtensor, make_spec, spec_of
from vescale.gradients._bucket import Bucket
from vescale.gradients._bucket_memory import BucketSlot
from vescale.gradients._complete_gradient import local_part
from vescale.gradients._parameter import GradientRule, ReducedParameter
from vescale.gradients._reduction import Policy, divide_

# Ranks that have contributions, op, dtype and device of one reduction.
_Kind = tuple[frozenset[int], str, torch.dtype, torch.device]


def reduce_pending(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, with Partial ones replaced by new ones that are Replicate on these axes; called alike on every rank.

    Communication: one all-reduce over the union of the axes for all tensors whose Partial axes span the same ranks, on any
    mesh, and that have the same op, dtype and device; sums and averages are reduced together. A tensor with a Partial of
    PyTorch's private kinds, or with several ops, is reduced separately. Tensors on meshes that lack this rank are returned
    as they are.
    """
    found = list(tensors)
    layouts = {spec_of(tensor).placements for tensor in tensors if isinstance(tensor, DTensor)}
    if not any(placement.is_partial() for placements in layouts for placement in placements):
        return found
    slots: dict[_Kind, list[BucketSlot[Bucket]]] = defaultdict(list)
    locals_: dict[BucketSlot[Bucket], tuple[int, torch.Tensor]] = {}
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is None:
            continue
        if not any(p.is_partial() for p in tensor.placements):
            continue
        pending = ReducedParameter(f"tensor {index}", tensor, GradientRule(), Policy(tensor.device_mesh, "sum", None))
        arrival = pending.arrival_of(tensor)
        contribution = pending.contribution(arrival)
        local = pending.staged(arrival, contribution.staged, local_part(tensor))
        if contribution.reduction is None:
            found[index] = _replicated(tensor, local)
            continue
        (stage,) = contribution.reduction.stages
        slot = pending.new_slot(arrival, 1)
        slots[stage.axes.group().ranks, stage.op, tensor.dtype, local.device].append(slot)
        locals_[slot] = index, local.detach()  # an alias: with a single reference it would be reduced in place
    buckets = [
        Bucket(number, together[0].reduction, together, requester="pending gradients")
        for number, together in enumerate(slots.values())
    ]
    for bucket in buckets:
        for slot in bucket.slots:
            bucket.arrive(slot, locals_[slot][1])
        bucket.launch({})
    for bucket in buckets:
        bucket.finish()
        for slot, local in zip(bucket.slots, bucket.results().tensors):
            index, _ = locals_[slot]
            tensor = tensors[index]
            assert isinstance(tensor, DTensor)
            sizes = [tensor.device_mesh.size(axis) for axis, p in enumerate(tensor.placements) if p.is_partial("avg")]
            if math.prod(sizes) > 1:
                divide_(local, math.prod(sizes))
            found[index] = _replicated(tensor, local)
    return found


def _replicated(tensor: DTensor, local: torch.Tensor) -> DTensor:
    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    spec = make_spec(tensor.device_mesh, placements, tensor.shape, tensor.stride(), tensor.dtype)
    return make_dtensor(local, spec)
