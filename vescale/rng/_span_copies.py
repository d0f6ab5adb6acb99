"""Copies between a span of the stream and a local tensor, and the fallback that fills one from the whole tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vescale.rng._fill_request import Fill
from vescale.rng._stream_spans import Span, spans


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
