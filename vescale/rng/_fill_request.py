"""``Fill``: the request to an engine to generate a rank's part of one random fill of a whole tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from vescale.errors import GeneratorError
from vescale.placements import Region
from vescale.rng._random_ops import RandomOp
from vescale.rng._stream_spans import is_contiguous, stream_order


@dataclass(frozen=True)
class Fill:
    """``op`` on a whole tensor of ``region.global_shape`` and ``strides``, of which a rank holds ``region``."""

    op: RandomOp
    region: Region
    strides: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.region.global_shape

    @property
    def numel(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape)

    @property
    def order(self) -> tuple[int, ...]:
        """The dims from slowest to fastest in memory, the order in which one device fills them."""
        return stream_order(self.shape, self.strides)

    @property
    def is_row_major(self) -> bool:
        return is_contiguous(self.shape, self.strides)

    @property
    def is_dense(self) -> bool:
        """Whether the whole tensor has no holes in memory, in any order of its dims."""
        return is_contiguous([self.shape[dim] for dim in self.order], [self.strides[dim] for dim in self.order])

    @property
    def extent(self) -> int:
        """The distance in memory from the first to the last element of the whole tensor, in elements."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    def check(self, local: torch.Tensor) -> None:
        """Raises ValueError unless ``local`` has the shape of the region."""
        if local.shape != self.region.local_shape:
            raise GeneratorError(
                f"{self.op.name}: a local tensor of shape {tuple(local.shape)} for a region of shape "
                f"{self.region.local_shape} of the global shape {self.shape}; expected the same shapes: give the local "
                "tensor of this very rank"
            )

    def as_real(self, local: torch.Tensor) -> tuple[Fill, torch.Tensor]:
        """The same fill for the real view of a complex ``local``: twice as many elements and, for ``normal_``, half the
        variance."""
        op, flat = self.op, self.region.flat
        if op.name == "normal_":
            mean, std = _normal_arguments(*op.arguments)
            op = RandomOp("normal_", (mean, std / math.sqrt(2.0)))
        elif op.name != "uniform_":  # the native op refused all others
            raise AssertionError(f"{op.name} on {local.dtype}")
        doubled = None if flat is None else (2 * flat[0], 2 * flat[1])
        region = Region((*self.shape, 2), (*self.region.intervals, ((0, 2),)), doubled)
        view = torch.view_as_real(local)
        return Fill(op, region, (*(2 * stride for stride in self.strides), 1)), view if flat is None else view.flatten()


def _normal_arguments(mean: Any = 0.0, std: Any = 1.0) -> tuple[float, float]:
    return float(mean), float(std)
