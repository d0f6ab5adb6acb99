"""The CPU engine: fills a rank's part of a tensor, and leaves the generator as one device would."""

from __future__ import annotations

import functools
import warnings

import torch

from vescale.rng._draw_rules import Cursor, DrawRule
from vescale.rng._fill_request import Fill
from vescale.rng._mt19937 import Mt19937State
from vescale.rng._random_ops import RandomOp
from vescale.rng._self_checks import rule_holds
from vescale.rng._span_copies import copy_out, fill_from_whole, gathered, laid_out_as
from vescale.rng._stream_spans import spans

# The longest span that is copied from scratch memory: a span costs 30 us in Python, and longer ones do not fit the caches.
SCRATCH_ELEMENTS = 1 << 18
# Gaps of at most this many elements are generated and dropped: a skip costs about 20 us, an element 4 to 40 ns.
GAP_ELEMENTS = 1 << 12

_warned: set[tuple[str, torch.dtype]] = set()  # one warning for each op and dtype


def fill_region(
    local: torch.Tensor, fill: Fill, generator: torch.Generator, parameter: torch.Tensor | None = None
) -> None:
    """Fill ``local`` with its part of a fill of a whole tensor.

    ``local`` gets the bits that one device would compute there, and ``generator`` the state that one device would leave,
    also if ``local`` is empty. ``parameter`` is this rank's part of a tensor argument, of the shape of ``local``. If an
    error is raised, the generator is unchanged. Memory: O(1) beyond ``local``. Communication: none.
    """
    local = local.detach()
    parameter_dtype = None if parameter is None else parameter.dtype
    _check_arguments(fill.op, local.dtype, parameter_dtype)
    if fill.numel == 0:
        return
    fill.check(local)
    if local.is_complex():
        fill, local = fill.as_real(local)
    if parameter is not None:
        parameter = laid_out_as(local, parameter)
    rule = fill.op.cpu_rule(local.dtype, fill.numel, fill.is_row_major, parameter_dtype)
    if rule is None or not rule_holds(fill.op, local.dtype, rule, parameter_dtype):
        final = _replay(local, fill, generator, parameter)
    else:
        final = _generate(local, fill, rule, generator, parameter)
    final.write_to(generator)


@functools.lru_cache(maxsize=1024)
def _check_arguments(op: RandomOp, dtype: torch.dtype, parameter_dtype: torch.dtype | None) -> None:
    """Raise what the native op raises for bad arguments; on every rank, also on one with an empty shard."""
    parameter = None if parameter_dtype is None else torch.zeros(1, dtype=parameter_dtype)
    op.fill(torch.empty(1, dtype=dtype), torch.Generator(), parameter)


def _generate(
    local: torch.Tensor, fill: Fill, rule: DrawRule, generator: torch.Generator, parameter: torch.Tensor | None
) -> Mt19937State:
    cursor, n, op = Cursor(Mt19937State.of(generator)), fill.numel, fill.op
    scratch = torch.empty(0, dtype=local.dtype)
    for span in spans(fill.region, fill.order, local.stride(), SCRATCH_ELEMENTS, GAP_ELEMENTS):
        count = span.stop - span.start
        target = span.direct
        if target is not None:
            out = local.as_strided((count,), (1,), local.storage_offset() + target)
        else:
            if scratch.numel() < count:
                scratch = torch.empty(count, dtype=local.dtype)
            out = scratch[:count]
        aligned = None if parameter is None else gathered(span, parameter)

        def native(out: torch.Tensor, draws: torch.Generator, aligned: torch.Tensor | None = aligned) -> object:
            return op.fill(out, draws, aligned)

        rule.generate(cursor, n, span.start, out, native)
        if target is None:
            copy_out(span, out, local)
    return rule.final(cursor, n, local.dtype, op.fill)


def _replay(
    local: torch.Tensor, fill: Fill, generator: torch.Generator, parameter: torch.Tensor | None
) -> Mt19937State:
    """The fallback for a torch whose draws are not known: every rank fills the whole tensor and keeps its part."""
    if (fill.op.name, local.dtype) not in _warned:
        _warned.add((fill.op.name, local.dtype))
        warnings.warn(
            f"torch {torch.__version__}: how {fill.op.name} draws for {local.dtype} is not known; every rank generates the "
            "whole tensor and keeps its part (right, but slow and large)",
            stacklevel=2,
        )
    draws = torch.Generator()
    Mt19937State.of(generator).write_to(draws)
    fill_from_whole(fill, local, parameter, lambda whole, arguments: fill.op.fill(whole, draws, arguments))
    return Mt19937State.of(draws)
