"""Strides of whole tensors: contiguous ones, those that a local tensor implies, and those that a move keeps."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of ``shape``, as PyTorch computes them (a dim of size 0 counts as 1)."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


def stride_like(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a whole tensor of ``shape`` whose dims have the same order in memory as those of ``local``, and 0 where
    these are expanded.

    The result is the same on every rank, also where a rank holds one index of a dim that is not expanded: of two dims with
    equal strides, the one of local size 1 is the inner one.
    """
    order = sorted(range(len(shape)), key=lambda dim: (local.stride(dim), local.shape[dim] > 1, -dim))
    return _dense(shape, order, _expanded(local.shape, local.stride()))


def moved_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides of what :func:`vescale.compat.expanded_as` makes of a tensor with these: dims that are expanded stay so, and
    the others keep their order; contiguous where none is."""
    expanded = _expanded(shape, stride)
    return (
        _dense(shape, sorted(range(len(shape)), key=lambda dim: (stride[dim], -dim)), expanded)
        if any(expanded)
        else contiguous_stride(shape)
    )


def _expanded(shape: Sequence[int], stride: Sequence[int]) -> list[bool]:
    return [size > 1 and not step for size, step in zip(shape, stride)]


def _dense(shape: Sequence[int], order: Sequence[int], expanded: Sequence[bool]) -> tuple[int, ...]:
    """Without gaps, ``order`` has the innermost dim first."""
    strides, step = [0] * len(shape), 1
    for dim in order:
        if not expanded[dim]:
            strides[dim] = step
            step *= max(shape[dim], 1)
    return tuple(strides)
