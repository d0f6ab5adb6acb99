"""Predicts the buckets in which gradients of parameters are reduced, with the functions that the runtime uses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vescale.comm import (
    DEFAULT_BUCKET_BYTES,
    BucketBytes,
    ReductionCost,
    bucket_limits,
    link_of,
    per_axis_bytes,
    plan_buckets,
    reduction_cost,
)
from vescale.plans import MeshAxes

__all__ = ["PartialGradient", "PredictedBucket", "predict_buckets"]


@dataclass(frozen=True)
class PartialGradient:
    """A gradient that every rank along ``axes`` has a part of: ``num_bytes`` on each rank.

    ``scatter`` is the one of the axes on which the parameter is sharded at rest, if any.
    """

    name: str
    axes: tuple[str, ...]
    num_bytes: int
    dtype: torch.dtype
    scatter: str | None = None


@dataclass(frozen=True)
class PredictedBucket:
    """Gradients that are reduced together.

    Attributes:
        names: of the parameters, in the order in which their gradients get ready.
        axes: their union is one group.
        num_bytes: of the buffer.
        cost: of the reduction, by the ring model.
        per_axis_bytes: what a rank would send if each axis were reduced by itself.
    """

    names: tuple[str, ...]
    axes: tuple[str, ...]
    num_bytes: int
    cost: ReductionCost
    per_axis_bytes: int
    scatter: str | None = None

    @property
    def collectives(self) -> tuple[tuple[str, str, int], ...]:
        """(op, axes joined with ``,``, bytes) of each."""
        axes = ",".join(self.axes)
        if not self.cost.scatters:
            return (("all_reduce", axes, self.cost.num_bytes),)
        rest = self.cost.rest_bytes
        scattered = ("reduce_scatter", str(self.scatter), self.cost.num_bytes - rest)
        others = ",".join(axis for axis in self.axes if axis != self.scatter)
        return (scattered, ("all_reduce", others, rest)) if others else (scattered,)


def predict_buckets(
    gradients: Sequence[PartialGradient],
    axes: MeshAxes,
    bucket_bytes: BucketBytes = DEFAULT_BUCKET_BYTES,
    device_type: str = "cpu",
) -> tuple[PredictedBucket, ...]:
    """The buckets of ``gradients``, given in the order in which they get ready."""
    link = link_of(device_type)
    num_ranks = [math.prod(axes.size(axis) for axis in gradient.axes) for gradient in gradients]
    limits = bucket_limits(bucket_bytes, max(num_ranks, default=1), link)
    found = []
    for indices in plan_buckets([((g.axes, g.dtype, g.scatter), g.num_bytes) for g in gradients], limits):
        first, num_bytes = gradients[indices[0]], sum(gradients[index].num_bytes for index in indices)
        num_pieces = axes.size(first.scatter) if first.scatter is not None else 1
        cost = reduction_cost(num_bytes, num_ranks[indices[0]], num_pieces, link)
        unfused = per_axis_bytes(num_bytes, [axes.size(axis) for axis in first.axes])
        names = tuple(gradients[index].name for index in indices)
        found.append(PredictedBucket(names, first.axes, num_bytes, cost, unfused, first.scatter))
    return tuple(found)
