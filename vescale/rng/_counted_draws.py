"""``counting_draws``: random fills that tell what they would draw, for programs that run without numbers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from vescale.placements import Region
from vescale.rng._cpu_engine import GAP_ELEMENTS, SCRATCH_ELEMENTS
from vescale.rng._draw_rules import NormalBlocks, WordsPerElement
from vescale.rng._fill_request import Fill
from vescale.rng._stream_spans import spans

__all__ = ["NoteDraw", "counting_draws", "is_counted"]

NoteDraw = Callable[[str, torch.Tensor, int, int], None]
"""Told the name of a fill, this rank's part of the tensor, how many words of the generator it steps over, and how many spans
it generates."""

_threads = threading.local()


@contextmanager
def counting_draws(note: NoteDraw) -> Iterator[None]:
    """Inside, on this thread: a fill of a DTensor of which this rank holds a part calls ``note``, and generates nothing.

    The generator stays where it is. Fills for which the words of an element are not known, and those of DTensors that the
    rank holds as a whole, run as ever.
    """
    before = getattr(_threads, "note", None)
    _threads.note = note
    try:
        yield
    finally:
        _threads.note = before


def is_counted(fill: Fill, local: torch.Tensor, parameter: torch.Tensor | None) -> bool:
    """Whether a fill has been counted, so that nothing is to be generated."""
    note: NoteDraw | None = getattr(_threads, "note", None)
    if note is None or local.is_complex():
        return False
    rule = fill.op.cpu_rule(local.dtype, fill.numel, fill.is_row_major, None if parameter is None else parameter.dtype)
    if not isinstance(rule, WordsPerElement | NormalBlocks):
        return False
    skipped = max(rule.num_words(fill.numel) - rule.words * local.numel(), 0)
    note(fill.op.name, local, skipped, _num_spans(fill.region, fill.order, local.stride()))
    return True


@functools.lru_cache(maxsize=256)
def _num_spans(region: Region, order: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum(1 for _ in spans(region, order, strides, SCRATCH_ELEMENTS, GAP_ELEMENTS))
