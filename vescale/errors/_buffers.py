"""Errors of flat buffers and their layouts."""

from __future__ import annotations

from vescale.errors._coded import Coded

__all__ = [
    "BufferMemoryError",
    "DBufferError",
    "GranularityError",
    "LayoutError",
    "LayoutPlanningError",
    "LayoutTextError",
    "UnknownTensorError",
]


class LayoutError(Coded, ValueError):
    """The numbers of a `Layout` contradict each other."""

    code = "VS0502"


class LayoutTextError(Coded, ValueError):
    """A text is no layout or shape list, or one of another version."""

    code = "VS0503"


class GranularityError(Coded, ValueError):
    """A block size does not fit a tensor, or a pattern matches no parameter."""

    code = "VS0504"


class LayoutPlanningError(Coded, ValueError):
    """`plan_layout` or `suggest_num_shards` was given numbers that cannot be planned."""

    code = "VS0505"


class DBufferError(Coded, ValueError):
    """An operation on a `DBuffer` does not fit its placements, axes or layout."""

    code = "VS0506"


class BufferMemoryError(Coded, RuntimeError):
    """The memory of a buffer was used before it was allocated, or reserved after."""

    code = "VS0507"


class UnknownTensorError(Coded, KeyError):
    """A group of tensors or the shipped shape lists have nothing of that name."""

    code = "VS0508"
