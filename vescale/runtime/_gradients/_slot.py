"""``Slot``: the place of one gradient in a bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vescale.runtime._gradients._reduction import Arrival, Contribution, Reduction

if TYPE_CHECKING:
    from vescale.runtime._gradients._bucket import Bucket

__all__ = ["Slot"]


class Slot:
    """The place of one gradient in a bucket.

    Attributes:
        name: the parameter's.
        entry: whose gradient it is; opaque here.
        arrival, contribution: how it comes, and what is to be done.
        num_expected: how often it comes in one backward (more than once under reentrant checkpointing).
        parameter: whose ``grad`` is the contribution as it stands, so that the bucket may take it from there; None where it
            is brought into form first.
        bucket, index: where the place is.
        is_heard, is_quiet: whether the bucket is told when a gradient has come, and whether it takes it by itself; see
            :class:`Attention`.
    """

    bucket: Bucket
    index: int
    is_heard, is_quiet = True, False

    def __init__(
        self,
        name: str,
        entry: Any,
        arrival: Arrival,
        contribution: Contribution,
        num_expected: int,
        parameter: nn.Parameter | None = None,
    ) -> None:
        self.name, self.entry = name, entry
        self.arrival, self.contribution = arrival, contribution
        self.num_expected = num_expected
        self.parameter = parameter
        self.strides = torch.empty(contribution.local_shape, device="meta").stride()

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
