"""``BucketSlot``: the place of one gradient in a bucket."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from torch.distributed.tensor import DTensor

from vescale.compat import spec_of
from vescale.gradients._reduction import Arrival, Contribution, Reduction

__all__ = ["BucketSlot"]

BucketT = TypeVar("BucketT")


class BucketSlot(Generic[BucketT]):
    """The place of one gradient in a bucket.

    Attributes:
        name: name of the parameter.
        owner: the object that the gradient belongs to; opaque here.
        arrival, contribution: how the gradient arrives, and what has to be done with it.
        num_expected: how often it arrives in one backward (more than once under reentrant checkpointing).
        parameter: the parameter whose ``grad``, or the local tensor of it, is the contribution without any conversion, so
            that the bucket may take it from there; None if the contribution is converted first.
        spec, result_spec: of ``grad`` when it arrives and when it is complete, where these are DTensors; else None.
        bucket, index: the bucket, and the position in it.
        is_notified, is_collected: whether a hook notifies the bucket of each gradient, and whether the bucket collects the
            gradient from the parameter; see :class:`HookMuting`.
    """

    bucket: BucketT
    index: int
    is_notified, is_collected = True, False

    def __init__(
        self,
        name: str,
        owner: Any,
        arrival: Arrival,
        contribution: Contribution,
        num_expected: int,
        parameter: torch.Tensor | None = None,
        spec: Any = None,
        result_spec: Any = None,
    ) -> None:
        self.name, self.owner = name, owner
        self.arrival, self.contribution = arrival, contribution
        self.num_expected = num_expected
        self.parameter, self.spec, self.result_spec = parameter, spec, result_spec
        self.strides = torch.empty(contribution.local_shape, device="meta").stride()

    def note_spec_of(self, gradient: torch.Tensor) -> None:
        """Of a gradient that has arrived here; the next one has the same, most likely."""
        if self.spec is not None and isinstance(gradient, DTensor):
            self.spec = spec_of(gradient)

    @property
    def reduction(self) -> Reduction:
        assert self.contribution.reduction is not None
        return self.contribution.reduction

    @property
    def numel(self) -> int:
        return self.contribution.numel

    @property
    def num_bytes(self) -> int:
        return self.numel * self.reduction.reduce_dtype.itemsize
