"""The CPU engine: a rank's part of a random fill, and the generator state that one device would be left with."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch

from vescale.placements import Region
from vescale.rng._complex import as_real
from vescale.rng._draws import Cursor, DrawRule
from vescale.rng._mt19937 import Mt19937State
from vescale.rng._ops import RandomOp
from vescale.rng._probes import rule_holds
from vescale.rng._spans import Span, is_contiguous, spans, stream_order

__all__ = ["fill_region"]

# The longest stretch that goes through scratch memory. A stretch costs 70 us in Python: longer ones leave the caches.
SCRATCH_ELEMENTS = 1 << 19
# Gaps up to this many elements are generated and dropped: skipping costs about 20 us, an element 4 to 40 ns.
GAP_ELEMENTS = 1 << 12

_warned: set[tuple[str, torch.dtype]] = set()  # one warning for each op and dtype


def fill_region(
    local: torch.Tensor,
    region: Region,
    global_strides: Sequence[int],
    op: RandomOp,
    generator: torch.Generator,
    parameter: torch.Tensor | None = None,
) -> None:
    """Fill ``local`` with its part of ``op`` on a whole tensor of ``region.global_shape`` and ``global_strides``.

    ``local`` gets the bits that one device would put there, and ``generator`` the state that one device would leave,
    also when ``local`` is empty. ``parameter``: this rank's part of a tensor argument, of the shape of ``local``.
    The generator is left alone when an error is raised. Memory: O(1) beyond ``local``. Communication: none.
    """
    local = local.detach()
    shape = region.global_shape
    n = math.prod(shape)
    parameter_dtype = None if parameter is None else parameter.dtype
    _check_arguments(op, local, parameter_dtype)
    if n == 0:
        return
    if local.shape != region.local_shape:
        raise ValueError(
            f"{op.name}: a local tensor of shape {tuple(local.shape)} for a region of shape {region.local_shape} of "
            f"the global shape {shape}; expected the same shapes: give the local tensor of this very rank"
        )
    if local.is_complex():  # torch fills the real view, normal_ with half the variance
        op, local, region, global_strides = as_real(op, local, region, global_strides)
        n *= 2
    contiguous = is_contiguous(region.global_shape, global_strides)
    rule = op.cpu_rule(local.dtype, n, contiguous, parameter_dtype)
    order = stream_order(region.global_shape, global_strides)
    if rule is None or not rule_holds(op, local.dtype, rule, parameter_dtype):
        final = _replay(local, region, global_strides, order, op, generator, parameter)
    else:
        final = _generate(local, region, order, n, rule, op, generator, parameter)
    final.write_to(generator)


def _check_arguments(op: RandomOp, local: torch.Tensor, parameter_dtype: torch.dtype | None) -> None:
    """Raise what the native op raises for bad arguments, on every rank, also one with an empty shard."""
    parameter = None if parameter_dtype is None else torch.zeros(1, dtype=parameter_dtype)
    op.fill(torch.empty(1, dtype=local.dtype), torch.Generator(), parameter)


def _generate(
    local: torch.Tensor,
    region: Region,
    order: Sequence[int],
    n: int,
    rule: DrawRule,
    op: RandomOp,
    generator: torch.Generator,
    parameter: torch.Tensor | None,
) -> Mt19937State:
    cursor = Cursor(Mt19937State.of(generator))
    if parameter is not None:  # laid out as the local tensor, so that pieces address both
        parameter = torch.empty_strided(local.shape, local.stride(), dtype=parameter.dtype).copy_(parameter)
    scratch = torch.empty(0, dtype=local.dtype)
    for span in spans(region, order, local.stride(), SCRATCH_ELEMENTS, GAP_ELEMENTS):
        count = span.stop - span.start
        target = span.direct
        if target is not None:
            out = local.as_strided((count,), (1,), local.storage_offset() + target)
        else:
            if scratch.numel() < count:
                scratch = torch.empty(count, dtype=local.dtype)
            out = scratch[:count]
        aligned = None if parameter is None else _gathered(span, parameter)

        def fill(out: torch.Tensor, draws: torch.Generator, aligned: torch.Tensor | None = aligned) -> object:
            return op.fill(out, draws, aligned)

        rule.generate(cursor, n, span.start, out, fill)
        if target is None:
            _copy_out(span, out, local)
    return rule.final(cursor, n, local.dtype, op.fill)


def _replay(
    local: torch.Tensor,
    region: Region,
    global_strides: Sequence[int],
    order: Sequence[int],
    op: RandomOp,
    generator: torch.Generator,
    parameter: torch.Tensor | None,
) -> Mt19937State:
    """The slow way, for a torch whose draws are not known: the whole tensor on every rank, then this rank's part."""
    if (op.name, local.dtype) not in _warned:
        _warned.add((op.name, local.dtype))
        warnings.warn(
            f"torch {torch.__version__}: how {op.name} draws for {local.dtype} is not known; every rank generates the "
            "whole tensor and keeps its part (right, but slow and large)",
            stacklevel=2,
        )
    draws = torch.Generator()
    Mt19937State.of(generator).write_to(draws)
    whole = torch.empty_strided(region.global_shape, global_strides, dtype=local.dtype)
    parts = list(spans(region, order, local.stride(), whole.numel(), 0))
    arguments = None
    if parameter is not None:
        laid_out = torch.empty_strided(local.shape, local.stride(), dtype=parameter.dtype).copy_(parameter)
        in_order = torch.zeros(whole.numel(), dtype=parameter.dtype)
        for span in parts:
            in_order[span.start : span.stop] = _gathered(span, laid_out)
        arguments = in_order.view([whole.shape[dim] for dim in order]).permute(_inverse(order))
    op.fill(whole, draws, arguments)
    stream = whole.permute(tuple(order)).reshape(-1)
    for span in parts:
        _copy_out(span, stream[span.start : span.stop], local)
    return Mt19937State.of(draws)


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=lambda position: order[position])


def _copy_out(span: Span, generated: torch.Tensor, local: torch.Tensor) -> None:
    for piece in span.pieces:
        source = generated.as_strided(piece.sizes, piece.span_strides, generated.storage_offset() + piece.span_offset)
        local.as_strided(piece.sizes, piece.local_strides, local.storage_offset() + piece.local_offset).copy_(source)


def _gathered(span: Span, local: torch.Tensor) -> torch.Tensor:
    """A local tensor's elements at their places in the span; the gaps hold zeros."""
    gathered = torch.zeros(span.stop - span.start, dtype=local.dtype)
    for piece in span.pieces:
        source = local.as_strided(piece.sizes, piece.local_strides, local.storage_offset() + piece.local_offset)
        gathered.as_strided(piece.sizes, piece.span_strides, piece.span_offset).copy_(source)
    return gathered
