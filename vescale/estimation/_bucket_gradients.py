"""Gradients that a reducer completes in buckets, or that have memory of their own beside a unit's: what every rank holds of
them, and what is reduced."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import local_of
from vescale.fsdp import state_of
from vescale.ir import Repeats
from vescale.placements import local_region
from vescale.plans import MeshAxes
from vescale.runtime import gradient_reducer


@dataclass(frozen=True)
class BucketGradient:
    """A gradient that has a slot in a bucket.

    Attributes:
        name: of the parameter; ``shape``: its global shape.
        axes, placements: of the slot, which is of the rank's part by these.
        itemsize: bytes of an element of the complete gradient.
        is_scattered: whether each rank along an axis gets a piece of the bucket.
        bucket: the requester of its collectives.
        least: elements of a slot for a part without any: the mark of unused parameters.
        dtype: of the bucket.
        over: the axes over which it is reduced; ``scattered_over``: the one along which each rank may get a piece.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    placements: tuple[Placement, ...]
    itemsize: int
    is_scattered: bool
    numel: int
    bucket: str
    least: int = 1
    dtype: torch.dtype = torch.float32
    over: tuple[str, ...] = ()
    scattered_over: str | None = None

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    def numels(self, axes: MeshAxes) -> np.ndarray:
        """Elements of each rank's part, as an array that broadcasts over the mesh."""
        cut = {axis: p for axis, p in zip(self.axes, self.placements) if not p.is_replicate() and axes.size(axis) > 1}
        sizes = tuple(size if axis in cut else 1 for axis, size in zip(axes.names, axes.sizes))
        placements = tuple(cut.get(axis, Replicate()) for axis in axes.names)
        found = np.empty(sizes, dtype=np.int64)
        for coordinate in np.ndindex(*sizes):
            found[coordinate] = math.prod(local_region(self.shape, placements, axes.sizes, coordinate).local_shape)
        return found


def bucket_gradients(model: nn.Module) -> list[BucketGradient]:
    """Of a parallelized model that has run a step."""
    found = []
    for bucket in gradient_reducer(model).buckets:
        for slot in bucket.slots:
            mesh, staged = slot.owner.destination.mesh, slot.contribution.staged
            if mesh is None or staged is None:
                continue
            reduction = bucket.reduction
            over = [name for stage in reduction.stages for name in stage.axes.names]
            names = reduction.stages[0].axes.mesh.mesh_dim_names or ()
            found.append(
                BucketGradient(
                    slot.name,
                    slot.owner.destination.shape,
                    tuple(mesh.mesh_dim_names or ()),
                    tuple(Replicate() if isinstance(p, Partial) else p for p in staged),
                    bucket.reduction.dtype.itemsize,
                    bucket.reduction.scatter is not None,
                    max(slot.numel, 1),
                    bucket.requester,
                    dtype=reduction.reduce_dtype,
                    over=tuple(over),
                    scattered_over=None if reduction.scatter is None else names[reduction.scatter],
                )
            )
    return found


def gradients_beside_units(model: nn.Module) -> list[BucketGradient]:
    """Of parameters of units that other modules used, while they were in parts: such gradients are in no unit's buffer. None
    that a reducer completes.

    Args:
        model: parallelized, with the gradients of a step.
    """
    states = dict.fromkeys(state_of(module) for module in model.modules())
    groups = [group for state in states if state is not None for group in state.groups]
    sizes = {
        p.sharded: bucket.shards.num_bytes for group in groups for bucket in group.buckets for p in bucket.parameters
    }
    found = []
    reduced = {slot.name for bucket in gradient_reducer(model).buckets for slot in bucket.slots}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if parameter not in sizes or name in reduced or not isinstance(grad, DTensor):
            continue
        if local_of(grad).untyped_storage().nbytes() != sizes[parameter]:
            axes, shape = tuple(grad.device_mesh.mesh_dim_names or ()), tuple(grad.shape)
            found.append(BucketGradient(name, shape, axes, grad.placements, grad.element_size(), False, 0, "", least=0))
    return found


def bucket_bytes(
    gradients: Sequence[BucketGradient], repeats: Sequence[Repeats], in_units: Collection[str], axes: MeshAxes
) -> np.ndarray:
    """Of every rank: what gradients of parameters ``in_units`` take, whose buffers hold nothing of these, and what slots
    without elements take for other parameters."""
    total = np.zeros(axes.sizes, dtype=np.int64)
    times: Counter[tuple[BucketGradient, bool]] = Counter()
    for one in gradients:
        if not one.is_scattered:
            times[replace(one, name="", bucket=""), one.name in in_units] += _count(one, repeats)
    for (one, is_in_unit), count in times.items():
        numels = one.numels(axes)
        slots = np.maximum(numels, one.least)
        total += np.broadcast_to(slots if is_in_unit else slots - numels, axes.sizes) * one.itemsize * count
    return total


def bucket_shares(gradients: Sequence[BucketGradient], repeats: Sequence[Repeats]) -> dict[str, float]:
    """By requester, how many times as much as in what was run a bucket reduces."""
    ran: Counter[str] = Counter()
    of_all: Counter[str] = Counter()
    for one in gradients:
        ran[one.bucket] += one.numel
        of_all[one.bucket] += one.numel * _count(one, repeats)
    return {name: of_all[name] / ran[name] for name in ran}


def _count(gradient: BucketGradient, repeats: Sequence[Repeats]) -> int:
    return next((r.count for r in repeats if r.holds(gradient.module)), 1)
