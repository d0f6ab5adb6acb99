"""Gradients that a reducer completes in buckets: what every rank holds of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.ir import Repeats
from vescale.placements import local_region
from vescale.plans import MeshAxes
from vescale.runtime import gradient_reducer

__all__ = ["BucketGradient", "bucket_bytes", "bucket_gradients"]


@dataclass(frozen=True)
class BucketGradient:
    """A gradient that has a slot in a bucket whose result is not scattered.

    Attributes:
        name: of the parameter; ``shape``: its global shape.
        axes, placements: of the slot, which is of the rank's part by these.
        itemsize: bytes of an element of the complete gradient.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    placements: tuple[Placement, ...]
    itemsize: int

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
            if bucket.reduction.scatter is None and mesh is not None and staged is not None:
                placements = tuple(Replicate() if isinstance(p, Partial) else p for p in staged)
                shape, itemsize = slot.owner.destination.shape, bucket.reduction.dtype.itemsize
                found.append(BucketGradient(slot.name, shape, tuple(mesh.mesh_dim_names or ()), placements, itemsize))
    return found


def bucket_bytes(
    gradients: Sequence[BucketGradient], repeats: Sequence[Repeats], in_units: Collection[str], axes: MeshAxes
) -> np.ndarray:
    """Of every rank: what the slots of parameters ``in_units`` take, whose buffers hold nothing of these gradients, and
    what slots without elements take for other parameters."""
    total = np.zeros(axes.sizes, dtype=np.int64)
    times: Counter[tuple[BucketGradient, bool]] = Counter()
    for one in gradients:
        count = next((r.count for r in repeats if r.holds(one.module)), 1)
        nameless = BucketGradient("", one.shape, one.axes, one.placements, one.itemsize)
        times[nameless, one.name in in_units] += count
    for (one, is_in_unit), count in times.items():
        numels = one.numels(axes)
        slots = np.maximum(numels, 1)  # a slot without elements has one for the mark of unused parameters
        total += np.broadcast_to(slots if is_in_unit else slots - numels, axes.sizes) * one.itemsize * count
    return total
