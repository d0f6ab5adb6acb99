"""Moving elements between a span of the stream and a local tensor; and the slow way to fill one, from the whole tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vescale.rng._fill_request import Fill
from vescale.rng._stream_spans import Span, spans

__all__ = ["copy_out", "fill_from_whole", "gathered", "laid_out_as"]


def copy_out(span: Span, generated: torch.Tensor, local: torch.Tensor) -> None:
    """The span's pieces, from the generated elements of the span to their places in ``local``."""
    for piece in span.pieces:
        source = generated.as_strided(piece.sizes, piece.span_strides, generated.storage_offset() + piece.span_offset)
        local.as_strided(piece.sizes, piece.local_strides, local.storage_offset() + piece.local_offset).copy_(source)


def gathered(span: Span, local: torch.Tensor) -> torch.Tensor:
    """A local tensor's elements at their places in the span; the gaps hold zeros."""
    found = torch.zeros(span.stop - span.start, dtype=local.dtype, device=local.device)
    for piece in span.pieces:
        source = local.as_strided(piece.sizes, piece.local_strides, local.storage_offset() + piece.local_offset)
        found.as_strided(piece.sizes, piece.span_strides, piece.span_offset).copy_(source)
    return found


def laid_out_as(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """``parameter`` in the memory layout of ``local``, so that pieces address both."""
    made = torch.empty_strided(local.shape, local.stride(), dtype=parameter.dtype, device=local.device)
    return made.copy_(parameter)


def fill_from_whole(
    fill: Fill,
    local: torch.Tensor,
    parameter: torch.Tensor | None,
    native: Callable[[torch.Tensor, torch.Tensor | None], object],
) -> None:
    """``native(whole, parameter)`` fills the whole tensor; this rank's part of it is kept. Memory: the whole tensor.

    ``parameter``: laid out as ``local``; what other ranks hold of it is taken as zero.
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
