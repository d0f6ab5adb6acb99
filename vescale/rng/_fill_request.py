"""``Fill``: the request to an engine to generate a rank's part of one random fill of a whole tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vescale.errors import GeneratorError
from vescale.placements import Region
from vescale.rng._random_ops import RandomOp
from vescale.rng._stream_spans import Span, is_contiguous, spans, stream_order


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
                f"{self.region.local_shape} of the global shape {self.shape}; expected the same shapes: pass the "
                "local tensor of this rank"
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


# Copies between a span of the stream and a local tensor, and the fallback that fills one from the whole tensor.


def copy_out(span: Span, generated: torch.Tensor, local: torch.Tensor) -> None:
    """Copy the span's pieces from the generated elements of the span to ``local``."""
    for piece in span.pieces:
        source = generated.as_strided(piece.sizes, piece.span_strides, generated.storage_offset() + piece.span_offset)
        local.as_strided(piece.sizes, piece.local_strides, local.storage_offset() + piece.local_offset).copy_(source)


def gathered(span: Span, local: torch.Tensor) -> torch.Tensor:
    """The elements of a local tensor at their positions in the span; gaps are zero."""
    found = torch.zeros(span.stop - span.start, dtype=local.dtype, device=local.device)
    for piece in span.pieces:
        source = local.as_strided(piece.sizes, piece.local_strides, local.storage_offset() + piece.local_offset)
        found.as_strided(piece.sizes, piece.span_strides, piece.span_offset).copy_(source)
    return found


def laid_out_as(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """``parameter`` with the strides of ``local``, so that pieces address both."""
    made = torch.empty_strided(local.shape, local.stride(), dtype=parameter.dtype, device=local.device)
    return made.copy_(parameter)


def fill_from_whole(
    fill: Fill,
    local: torch.Tensor,
    parameter: torch.Tensor | None,
    native: Callable[[torch.Tensor, torch.Tensor | None], object],
) -> None:
    """Call ``native(whole, parameter)`` on the whole tensor and keep this rank's part. Memory: the whole tensor.

    ``parameter`` has the strides of ``local``; the other ranks' elements of it are zero.
    """
    order = fill.order
    inverse = sorted(range(len(order)), key=order.__getitem__)
    whole = torch.empty_strided(fill.shape, fill.strides, dtype=local.dtype, device=local.device)
    parts = list(spans(fill.region, order, local.stride(), max(fill.numel, 1), 0))
    arguments = None
    if parameter is not None:
        in_order = torch.zeros(fill.numel, dtype=parameter.dtype, device=local.device)
        for span in parts:
            in_order[span.start : span.stop] = gathered(span, parameter)
        arguments = in_order.view([fill.shape[dim] for dim in order]).permute(inverse)
    native(whole, arguments)
    stream = whole.permute(order).reshape(-1)
    for span in parts:
        copy_out(span, stream[span.start : span.stop], local)
