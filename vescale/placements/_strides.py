"""Strides of contiguous tensors."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["contiguous_stride"]


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of ``shape``, as PyTorch computes them (a dim of size 0 counts as 1)."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)
